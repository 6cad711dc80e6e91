#!/bin/sh -eu
# The broker, with a password derived from the token as every client derives it. Quoted, or one of digits were a number.
secret=$(sed 's/[[:space:]]*$//' "$PERSIA_TOKEN_FILE")
password=$(printf 'persia role nats %s' "$secret" | sha256sum)
NATS_PASSWORD="\"${password%% *}\""
export NATS_PASSWORD
exec nats-server --config /etc/nats.conf "$@"
