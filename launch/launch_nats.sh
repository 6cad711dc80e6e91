#!/bin/sh -eu
# NATS. Its password is the role token, which every client derives too. It is quoted, because NATS reads a token of
# digits as a number.
secret=$(sed 's/[[:space:]]*$//' "$PERSIA_TOKEN_FILE")
password=$(printf 'persia role nats %s' "$secret" | sha256sum)
NATS_PASSWORD="\"${password%% *}\""
export NATS_PASSWORD
exec nats-server --config /etc/nats.conf "$@"
