#!/bin/sh -u
# List everything that this machine lacks to build and test Persia, and how to get it. The exit code is 2 if anything is missing.
# Usage: tools/check_machine.sh PYTHON
python=$1
wrong=0

lacks() {
    wrong=2
    printf 'missing: %s\n    %s\n' "$1" "$2" >&2
}

if ! command -v "$python" >/dev/null; then
    lacks "$python" "install Python 3.10 or later (Debian: apt-get install python3 python3-venv), or select one: make PYTHON=/path/to/python"
elif ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    lacks "Python 3.10 or later ($python is $("$python" -V 2>&1))" "select a newer one: make PYTHON=/path/to/python"
elif ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    lacks "the venv module of $python" "Debian: apt-get install python3-venv"
fi

oldest=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' rust_core/Cargo.toml)
if ! command -v cargo >/dev/null || ! found=$(rustc --version 2>/dev/null); then
    lacks "cargo and rustc $oldest or later" "install a Rust toolchain with rustup: https://rustup.rs"
else
    found=$(printf '%s' "$found" | cut -d ' ' -f 2)
    if [ "$(printf '%s\n%s\n' "$oldest" "$found" | sort -V | head -n 1)" != "$oldest" ]; then
        lacks "rustc $oldest or later (this one is $found)" "rustup update"
    fi
fi

if ! command -v cc >/dev/null; then
    lacks "a C compiler and linker (cc)" "Debian: apt-get install gcc libc6-dev"
fi

exit $wrong
