#!/bin/sh -eu
# A middleware. It owns nothing, so `--scale` may add more than MIDDLEWARE_REPLICA says.
if [ "$REPLICA_INDEX" -ge "${REPLICA_SIZE:-1}" ]; then
    export REPLICA_SIZE=$((REPLICA_INDEX + 1))
fi
exec persia-embedding-sharded-middleware "$@"
