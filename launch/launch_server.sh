#!/bin/sh -eu
# An embedding server: one replica of REPLICA_SIZE, with a separate data directory.
export PERSIA_DATA_DIR="${PERSIA_DATA_DIR:-/server-data}/$REPLICA_INDEX"
mkdir -p "$PERSIA_DATA_DIR"
exec persia-embedding-sharded-server "$@"
