#!/bin/sh -eu
# The trainer's ranks of this container, GPU_NUM of them or one on the CPU:
# launch_persia.sh [SCRIPT [ARGUMENT...]], by default PERSIA_NN_WORKER_ENTRY.
if run_finished.sh; then
    summary=${PERSIA_RUN_DIR:-.}/summary.json
    echo "this run is finished: $summary"
    cat "$summary"
    echo "to train again: docker compose run --rm --no-deps trainer rm $summary"
    # `up --exit-code-from trainer` stops everything when the first trainer ends. One that ends while others are being
    # started would leave those running, and be killed itself before it has said anything; data_compose starts last.
    trap 'exit 0' TERM
    timeout 10 sh -c 'until getent hosts data_compose; do sleep 0.1; done' >/dev/null || true
    exit 0
fi
exec persia-launcher nn-worker -- "$@"
