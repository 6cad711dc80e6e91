#!/bin/sh -eu
# A middleware. It keeps no rows, so `--scale` may start more replicas than MIDDLEWARE_REPLICA.
if [ "$REPLICA_INDEX" -ge "${REPLICA_SIZE:-1}" ]; then
    export REPLICA_SIZE=$((REPLICA_INDEX + 1))
fi
exec persia-embedding-sharded-middleware "$@"
