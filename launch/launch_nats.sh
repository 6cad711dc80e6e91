#!/bin/sh -eu
# NATS. The password is a role token, which every client also derives. It is quoted, because NATS would read a token that consists
# only of digits as a number.
secret=$(sed 's/[[:space:]]*$//' "$PERSIA_TOKEN_FILE")
password=$(printf 'persia role nats %s' "$secret" | sha256sum)
NATS_PASSWORD="\"${password%% *}\""
export NATS_PASSWORD
exec nats-server --config /etc/nats.conf "$@"
