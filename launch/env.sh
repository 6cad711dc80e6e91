#!/bin/sh -eu
# Entry point of every image. It puts overrides first, makes the token, finds which replica this is, says which file
# runs, and then runs the command.

# Stopped while it starts: that is no success, unless the run had ended before.
trap 'run_finished.sh && exit 0; exit 75' TERM

fail() { # CODE WHAT NEXT
    printf 'error: %s\n  next: %s\n' "$2" "$3" >&2
    exit "$1"
}

# A launch script starts a replica of a service. Anything else (pytest, bash) may run outside of one.
command=${1:-}
command=${command##*/}
case $command in
launch_server.sh | persia-embedding-sharded-server) runs=persia-embedding-sharded-server ;;
launch_middleware.sh | persia-embedding-sharded-middleware) runs=persia-embedding-sharded-middleware ;;
launch_nats.sh) runs=nats-server ;;
'') fail 2 "no command was given" "name one, for example launch_server.sh" ;;
*) runs=persia_core.so ;;
esac

# --- Overrides: binaries by PATH, persia_core.so by PYTHONPATH.
overrides=${THIRD_PARTY_PATH:-}
overrides=${overrides%/}
if [ -n "$overrides" ] && [ -d "$overrides" ]; then
    PATH="$overrides:$PATH"
    PYTHONPATH="$overrides${PYTHONPATH:+:$PYTHONPATH}"
    export PATH PYTHONPATH
    if [ "$runs" != persia_core.so ] && [ -f "$overrides/$runs" ] && [ ! -x "$overrides/$runs" ]; then
        fail 2 "$overrides/$runs cannot be executed, so the packaged one would run instead" "chmod +x $runs, or remove it"
    fi
fi

# --- The cluster's secret: made by whoever starts first. The link either appears whole or already existed.
token=${PERSIA_TOKEN_FILE:-}
if [ -n "$token" ] && [ ! -s "$token" ]; then
    new=$(mktemp "$token.XXXXXX") || fail 5 "$token is missing and $(id -u):$(id -g) cannot make it" \
        "mount a folder that this user may write to, or a token of 32 bytes or more"
    od -A n -N 32 -t x1 /dev/urandom | tr -d ' \n' >"$new"
    chmod 0444 "$new"
    sync "$new"
    ln "$new" "$token" 2>/dev/null || [ -s "$token" ] || fail 5 "$token is empty" "remove it; a new one is made"
    rm -f "$new"
fi

# --- Which replica: swarm fills in the slot, counted from 1. Plain compose does not; there it is in the container's
# name, which Docker's DNS tells when it is asked directly. From here on REPLICA_INDEX counts from 0.
slot=${REPLICA_INDEX:-}
unset REPLICA_INDEX
case $slot in
'{{'*)
    address=$(hostname -i)
    name=$(getent -s dns hosts "${address%% *}" | awk '{ print $2; exit }')
    name=${name%%.*}
    slot=${name##*[-_]}
    case ${name%"$slot"} in
    '' | *[-_]run[-_]) slot= ;; # a container of `compose run` is no replica, and its name may end in digits
    esac
    asked="the container's name, ${name:-which Docker's DNS does not tell}"
    ;;
*) asked="REPLICA_INDEX, $slot" ;;
esac
case $slot in
'' | *[!0-9]* | 0*)
    case $command in
    launch_nats.sh) ;;
    launch_*) fail 2 "which replica this is cannot be told from $asked" "set REPLICA_INDEX to its number, counted from 1" ;;
    esac
    ;;
*)
    if [ "$slot" -gt "${REPLICA_SIZE:-1}" ] && [ "$command" != launch_middleware.sh ]; then
        fail 2 "this is replica $slot, but there are ${REPLICA_SIZE:-1} (REPLICA_SIZE)" \
            "change the count in .env; only middleware can be scaled with --scale"
    fi
    export REPLICA_INDEX=$((slot - 1))
    ;;
esac

# --- Which file runs, by what hash and build.
file=$(command -v "$runs" || true)
if [ "$runs" = persia_core.so ]; then
    file=$overrides/persia_core.so
    for packaged in /opt/venv/lib/python3*/site-packages/persia_core/*.so; do
        [ -f "$file" ] || file=$packaged
    done
    [ -f "$file" ] || file=
fi
if [ -n "$file" ]; then
    sum=$(sha256sum "$file")
    sum=${sum%% *}
    case $file in
    "${overrides:-/nowhere}"/*) kind=override builds=$overrides/BUILD_INFO ;;
    *) kind=packaged builds=/opt/persia/BUILD_INFO ;;
    esac
    build=$(sed -n "s/^$sum .* build=//p" "$builds" 2>/dev/null || true)
    printf 'running %s: %s sha256=%s build=%s\n' "$file" "$kind" "$sum" "${build:-unknown}" >&2
fi

# The tests lie beside the package, not in the user's folder, and use the stack around them. pytest names each one when
# it starts and counts it when it ends. Their own files go to a volume: nothing can be executed in /tmp.
if [ "$command" = pytest ]; then
    echo "collecting tests; the first import of PyTorch may take a minute" >&2
    cd /opt/persia
    export PERSIA_TEST_LIVE="${PERSIA_TEST_LIVE-1}"
    export PYTEST_ADDOPTS="-p no:cacheprovider --verbose -o console_output_style=count ${PYTEST_ADDOPTS-}"
    [ -z "${PERSIA_RUN_DIR-}" ] || export PYTEST_DEBUG_TEMPROOT="$PERSIA_RUN_DIR"
fi

exec "$@"
