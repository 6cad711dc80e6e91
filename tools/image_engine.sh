#!/bin/sh -u
# Print the source of the engine in the images of a test run, for ENGINE of services/Dockerfile.
#   prebuilt  from the compilation that the tests share
#   build     compiled in the image, as users compile it. This is the result if an input of the compilation has changed in the working
#             tree or in the last 10 commits, or if the image's C library is too old for binaries of this machine.
cd "$(dirname "$0")/.." || exit 3
oldest=$(git rev-parse --quiet --verify HEAD~10) || { echo build; exit 0; }
# The inputs are the lines of docker-compose.yaml about building, the lines of services/Dockerfile that name a stage, a variable, the
# compiler or /out, and the files of the third command. Comments do not count.
git diff --quiet -G '^[^#]*(build|context|dockerfile|target|network|args|ENGINE|LTO|BESIDE)' "$oldest" -- docker-compose.yaml || { echo build; exit 0; }
git diff --quiet -G '^[^#]*(FROM |ARG |ENV |cargo|maturin|rust|/out)' "$oldest" -- services/Dockerfile || { echo build; exit 0; }
git diff --quiet -G '^[^#]' "$oldest" -- .dockerignore tools/base_image.sh rust_core/Cargo.lock \
    ':(glob)rust_core/**/Cargo.toml' ':(glob)rust_core/**/build.rs' rust_core/core/pyproject.toml || { echo build; exit 0; }
ours=$(getconf GNU_LIBC_VERSION 2>/dev/null) || { echo build; exit 0; }
case $(printf '%s\n2.41\n' "${ours#glibc }" | sort -V | tail -n 1) in
    2.41) echo prebuilt ;;
    *) echo build ;;
esac
