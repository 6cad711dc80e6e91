#!/bin/sh -eu
# Entry point of the image for PersiaML's compose files. The containers share only the folder of the scripts, so the secret
# is in a folder below it that other users of the host cannot open.
mkdir -p -m 0700 "$(dirname "$PERSIA_TOKEN_FILE")"
exec entrypoint.sh "$@"
