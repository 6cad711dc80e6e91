#!/bin/sh -eu
# Entry point of every image. It sets the environment, makes the secret if there is none, reports which build runs, and
# runs the command. Each part is a file of its own, read into this shell.

# A container that is stopped while it starts has not succeeded, unless its run was finished before.
trap 'run_finished.sh && exit 0; exit 75' TERM

fail() { # CODE WHAT NEXT
    printf 'error: %s\n  next: %s\n' "$2" "$3" >&2
    exit "$1"
}

command=${1:-}
command=${command##*/}
[ -n "$command" ] || fail 2 "no command was given" "name one, for example launch_server.sh"

# The file that the command runs, of those that may be overridden.
case $command in
launch_server.sh | persia-embedding-sharded-server) runs=persia-embedding-sharded-server ;;
launch_middleware.sh | persia-embedding-sharded-middleware) runs=persia-embedding-sharded-middleware ;;
launch_nats.sh) runs=nats-server ;;
*) runs=persia_core.so ;;
esac

parts=$(dirname "$0")
. "$parts/env.sh"
. "$parts/secret.sh"
. "$parts/report_build.sh"

# The tests are in the image, not in the user's folder.
if [ "$command" = pytest ]; then
    shift
    set -- run_pytest.sh "$@"
fi
exec "$@"
