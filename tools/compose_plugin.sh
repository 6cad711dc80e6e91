#!/bin/sh -eu
# Make sure that `docker compose` exists. If it is missing, extract the plugin from Debian's package for this user.
if docker compose version >/dev/null 2>&1; then
    exit 0
fi
plugins=${DOCKER_CONFIG:-$HOME/.docker}/cli-plugins
"$(dirname "$0")/base_image.sh"
mkdir -p "$plugins"
new=$(mktemp "$plugins/.docker-compose.XXXXXX")
trap 'rm -f "$new"' EXIT
docker run --rm --network host "${BASE:-debian:trixie-slim}" sh -euc '
    { apt-get update && cd /tmp && apt-get --yes download docker-compose; } >&2
    dpkg-deb --fsys-tarfile docker-compose_*.deb | tar -x -O ./usr/libexec/docker/cli-plugins/docker-compose
' >"$new"
chmod 0755 "$new"
mv "$new" "$plugins/docker-compose"
docker compose version
