#!/bin/sh -eu
# The ranks of a trainer, GPU_NUM of them or one on the CPU: launch_persia.sh [SCRIPT [ARGUMENT...]]. SCRIPT defaults to
# PERSIA_NN_WORKER_ENTRY. If neither is set, the ranks train from PERSIA_CONFIG; without PERSIA_CONFIG, train.py runs.
# startup-hook.sh runs first.
if run_finished.sh; then
    summary=${PERSIA_RUN_DIR:-.}/summary.json
    echo "this run is finished: $summary"
    cat "$summary"
    echo "to train again, set another job name (PERSIA_JOB), or remove this file from the volume or folder of the run"
    echo "with compose: docker compose run --rm --no-deps trainer rm $summary"
    # `up --exit-code-from trainer` stops all containers when a trainer ends. If containers are still being started at
    # this time, they keep running, and this container is killed before its output appears. Therefore wait for data_compose,
    # which starts last.
    trap 'exit 0' TERM
    timeout 10 sh -c 'until getent hosts data_compose; do sleep 0.1; done' >/dev/null || true
    exit 0
fi
. "$(dirname "$0")/startup_hook.sh"
[ $# -gt 0 ] || [ -n "${PERSIA_CONFIG:-}${PERSIA_NN_WORKER_ENTRY:-}" ] || set -- train.py
exec persia-launcher nn-worker -- "$@"
