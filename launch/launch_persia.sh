#!/bin/sh -eu
# The ranks of a trainer, GPU_NUM of them or one on the CPU: launch_persia.sh [SCRIPT [ARGUMENT...]]. SCRIPT defaults to
# PERSIA_NN_WORKER_ENTRY; without it, the ranks train from PERSIA_CONFIG, or train.py runs. startup-hook.sh runs first.
if run_finished.sh; then
    summary=${PERSIA_RUN_DIR:-.}/summary.json
    echo "this run is finished: $summary"
    cat "$summary"
    echo "to train again: docker compose run --rm --no-deps trainer rm $summary"
    # `up --exit-code-from trainer` stops all containers when a trainer ends. If that happens while containers are being
    # started, those keep running, and this one is killed before its output appears. Wait for data_compose, which starts
    # last.
    trap 'exit 0' TERM
    timeout 10 sh -c 'until getent hosts data_compose; do sleep 0.1; done' >/dev/null || true
    exit 0
fi
. "$(dirname "$0")/startup_hook.sh"
[ $# -gt 0 ] || [ -n "${PERSIA_CONFIG:-}${PERSIA_NN_WORKER_ENTRY:-}" ] || set -- train.py
exec persia-launcher nn-worker -- "$@"
