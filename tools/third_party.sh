#!/bin/sh -eu
# Build the overrides of the packaged files into third_party/. `make third-party` runs this script in the development image.
# PROFILE=release|dev FEATURES=... BUILD=a description of these sources
cd "$(dirname "$0")/../rust_core"
profile=${PROFILE:-release}
features=${FEATURES:-}
out=../third_party

cargo build --profile "$profile" --locked --package persia-embedding-sharded-server
cargo build --profile "$profile" --locked --package persia-core --features "$features"

built=${CARGO_TARGET_DIR:-target}/$profile
[ "$profile" != dev ] || built=${CARGO_TARGET_DIR:-target}/debug
# The file is copied next to its destination and then renamed. A process that runs the old file therefore keeps it.
put() {
    cp "$built/$1" "$out/.$2"
    mv "$out/.$2" "$out/$2"
}
put persia-embedding-sharded-server persia-embedding-sharded-server
put persia-embedding-sharded-middleware persia-embedding-sharded-middleware
put libpersia_core.so persia_core.so
"$(dirname "$0")/build_info.sh" "$out" "${BUILD:-local} $profile${features:+ features=$features}"
cat "$out/BUILD_INFO"
