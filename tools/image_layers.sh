#!/bin/sh -eu
# Build the large layers of the images, which do not depend on the engine. `docker compose build` then finds them in the cache.
cd "$(dirname "$0")/.."
stage() {
    printf '  %s:\n    image: "%s-layers/%s"\n    build:\n' "$1" "${PERSIA_IMAGE:-persia}" "$1"
    printf '      {context: ., dockerfile: services/Dockerfile, target: %s, network: host,\n' "$1"
    printf '       args: {HTTP_PROXY: , HTTPS_PROXY: , NO_PROXY: , http_proxy: , https_proxy: , no_proxy: }}\n'
}
{ printf 'version: "3.8"\nservices:\n'; stage python; stage wheels; stage nats; } |
    docker compose --project-directory . --file - build
