#!/bin/bash
# Run the tests that need a CUDA device: kernels, training, and the kernels under compute-sanitizer if it is installed.
# Run this script with: make test-gpu
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python

"$python" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "error: no CUDA device here\n  next: nvidia-smi")'

test() { cargo test --manifest-path rust_core/Cargo.toml --package persia-cuda --release --locked --test device "$@"; }
test -- --ignored --test-threads 1

PERSIA_TEST_GPU=1 "$python" -m pytest tests/gpu

if sanitizer=$(command -v compute-sanitizer); then
    # The skipped cases take hours under compute-sanitizer.
    binary=$(test --no-run --message-format json | sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
    for tool in memcheck racecheck initcheck; do
        echo "== compute-sanitizer --tool $tool"
        "$sanitizer" --tool "$tool" --error-exitcode 1 "$binary" --ignored --test-threads 1 \
            --skip a_million_times --skip used_again
    done
else
    echo "compute-sanitizer is not installed and was skipped (it is part of the CUDA toolkit)"
fi
