#!/bin/sh -eu
# Entry point of every image: set paths, replica index and configuration files, create the secret if it does not exist, log the
# build that runs, and run the command. Each part is in a separate file.

# A container that is stopped during its start exits with 75, or with 0 if its run is already finished.
trap 'run_finished.sh && exit 0; exit 75' TERM

fail() { # CODE WHAT NEXT
    printf 'error: %s\n  next: %s\n' "$2" "$3" >&2
    exit "$1"
}

command=${1:-}
command=${command##*/}
[ -n "$command" ] || fail 2 "no command was given" "specify one, for example launch_server.sh"

# The file of the command, which third_party/ can override.
case $command in
launch_server.sh | persia-embedding-sharded-server) runs=persia-embedding-sharded-server ;;
launch_middleware.sh | persia-embedding-sharded-middleware) runs=persia-embedding-sharded-middleware ;;
launch_nats.sh) runs=nats-server ;;
*) runs=persia_core.so ;;
esac

parts=$(dirname "$0")
. "$parts/env.sh"
. "$parts/config.sh"
. "$parts/secret.sh"
. "$parts/report_build.sh"

# The tests are in the image, not in the working directory.
if [ "$command" = pytest ]; then
    shift
    set -- run_pytest.sh "$@"
fi
exec "$@"
