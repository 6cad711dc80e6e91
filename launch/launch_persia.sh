#!/bin/sh -eu
# The trainer's ranks of this container, GPU_NUM of them or one on the CPU:
# launch_persia.sh [SCRIPT [ARGUMENT...]], by default PERSIA_NN_WORKER_ENTRY.

# `up --exit-code-from trainer` stops all when the first trainer has ended. That one may only just have found the run
# finished, so the others say it too before Python is up, which does not yet handle signals while it starts.
summary=${PERSIA_RUN_DIR:-.}/summary.json
if grep -qs '"status": "finished"' "$summary"; then
    echo "this run is finished: $summary"
    cat "$summary"
    echo "to train again: docker compose run --rm --no-deps trainer rm $summary"
    exit 0
fi
exec persia-launcher nn-worker -- "$@"
