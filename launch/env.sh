# Set the paths and the replica index. entrypoint.sh reads this file after it has set `command` and `runs`.

# --- Paths: overrides come first; binaries are found by PATH, persia_core.so by PYTHONPATH.
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

# --- Replica index. Swarm sets REPLICA_INDEX to the task slot, counted from 1. Compose leaves the template as it is; there
# the number is the end of the container's name, which Docker's DNS returns for its address. REPLICA_INDEX is exported
# counted from 0.
slot=${REPLICA_INDEX:-}
unset REPLICA_INDEX
case $slot in
'{{'*)
    address=$(hostname -i)
    name=$(getent -s dns hosts "${address%% *}" | awk '{ print $2; exit }')
    name=${name%%.*}
    slot=${name##*[-_]}
    case ${name%"$slot"} in
    '' | *[-_]run[-_]) slot= ;; # `compose run` starts no replica, but the name may end in digits
    esac
    asked="the container's name, ${name:-which Docker's DNS does not know}"
    ;;
*) asked="REPLICA_INDEX, $slot" ;;
esac
case $slot in
'' | *[!0-9]* | 0*)
    case $command in
    launch_nats.sh | launch_serving.sh) ;;
    launch_*) fail 2 "the replica index cannot be determined from $asked" "set REPLICA_INDEX to its number, counted from 1" ;;
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
