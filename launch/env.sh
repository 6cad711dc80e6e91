# Set the paths and the replica index. entrypoint.sh reads this file after it has set `command` and `runs`.

# --- Paths. Overrides precede packaged files: binaries on PATH, persia_core.so on PYTHONPATH.
overrides=${THIRD_PARTY_PATH:-}
overrides=${overrides%/}
if [ -n "$overrides" ] && [ -d "$overrides" ]; then
    PATH="$overrides:$PATH"
    PYTHONPATH="$overrides${PYTHONPATH:+:$PYTHONPATH}"
    export PATH PYTHONPATH
    if [ "$runs" != persia_core.so ] && [ -f "$overrides/$runs" ] && [ ! -x "$overrides/$runs" ]; then
        fail 2 "$overrides/$runs is not executable, so the packaged file would run instead" "on the host: chmod +x $runs, or rm $runs"
    fi
fi

# --- Replica index, exported from 0. A swarm sets REPLICA_INDEX to the task slot, from 1. Compose does not replace the template. The
# number is then at the end of the container's name, which Docker's DNS returns for the container's address. Pods have POD_INDEX, from 0.
slot=${REPLICA_INDEX:-}
unset REPLICA_INDEX
case ${POD_INDEX:-} in '' | *[!0-9]*) ;; *) slot=$((POD_INDEX + 1)) ;; esac
case $slot in
'{{'*)
    address=$(hostname -i)
    name=$(getent -s dns hosts "${address%% *}" | awk '{ print $2; exit }')
    name=${name%%.*}
    slot=${name##*[-_]}
    case ${name%"$slot"} in
    '' | *[-_]run[-_]) slot= ;; # `compose run` starts no replica, but the name may end in digits
    # Compose runs all replicas on this host, so they share the processors.
    *) export PERSIA_HOST_REPLICAS="${REPLICA_SIZE:-1}" ;;
    esac
    asked="the container's name, ${name:-which Docker's DNS does not know}"
    ;;
*) asked="REPLICA_INDEX=$slot${POD_INDEX+ and POD_INDEX=$POD_INDEX}" ;;
esac
case $slot in
'' | *[!0-9]* | 0*)
    case ${POD_INDEX+pod}:$command in
    *:launch_nats.sh | *:launch_serving.sh) ;;
    *:launch_* | pod:persia-launcher) # the command of pods of data-compose
        fail 2 "the replica index cannot be determined from $asked" "set REPLICA_INDEX to the number of the replica, counted from 1" ;;
    esac
    ;;
*)
    if [ "$slot" -gt "${REPLICA_SIZE:-1}" ] && [ "$command" != launch_middleware.sh ]; then
        fail 2 "this is replica $slot, but there are ${REPLICA_SIZE:-1} (REPLICA_SIZE)" \
            "change the count in .env, or in persia-size on Kubernetes; only middleware can be scaled with --scale"
    fi
    export REPLICA_INDEX=$((slot - 1))
    ;;
esac
