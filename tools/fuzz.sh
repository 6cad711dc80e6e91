#!/bin/bash
# Fuzz a target of rust_core/fuzz (or all of them, in turn) with libFuzzer: tools/fuzz.sh SECONDS [TARGET ...]
# Findings are in rust_core/fuzz/artifacts/, new inputs of the corpus in rust_core/fuzz/target/corpus/.
set -euo pipefail
cd "$(dirname "$0")/../rust_core/fuzz"

seconds=${1:?usage: tools/fuzz.sh SECONDS [TARGET ...]}
shift
[ "$#" -gt 0 ] || set -- corpus/*
set -- "${@#corpus/}"

# Every toolchain has the LLVM pass for coverage. With --target, the pass does not apply to build scripts.
host=$(rustc -vV | sed -n 's/^host: //p')
flags="-Cpasses=sancov-module"
for option in -sanitizer-coverage-level=4 -sanitizer-coverage-trace-compares -sanitizer-coverage-inline-8bit-counters \
    -sanitizer-coverage-pc-table -simplifycfg-branch-fold-threshold=0; do
    flags="$flags -Cllvm-args=$option"
done
bins=()
for target in "$@"; do
    [ -d "corpus/$target" ] || { echo "no target $target; expected one of: $(cd corpus && echo *)" >&2; exit 2; }
    bins+=(--bin "$target")
done
RUSTFLAGS="$flags --cfg fuzzing" cargo build --release --locked --target "$host" --target-dir target "${bins[@]}"

for target in "$@"; do
    mkdir -p artifacts "target/corpus/$target"
    echo "== $target, $seconds s"
    "target/$host/release/$target" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 \
        -artifact_prefix="artifacts/$target-" -print_final_stats=1 "target/corpus/$target" "corpus/$target"
done
