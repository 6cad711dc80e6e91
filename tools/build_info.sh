#!/bin/sh -eu
# Write DIR/BUILD_INFO: the hash of each file of Persia in DIR, and DESCRIPTION with the version of rustc. report_build.sh reads it.
# Usage: tools/build_info.sh DIR DESCRIPTION
cd "$1"
sha256sum persia_core.so persia-embedding-sharded-server persia-embedding-sharded-middleware |
    sed "s|\$| build=$2 $(rustc --version | cut -d ' ' -f 1,2)|" >.BUILD_INFO
mv .BUILD_INFO BUILD_INFO
