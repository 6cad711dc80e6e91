#!/bin/sh -eu
# The trainer's ranks of this container, GPU_NUM of them or one on the CPU:
# launch_persia.sh [SCRIPT [ARGUMENT...]], by default PERSIA_NN_WORKER_ENTRY.
exec persia-launcher nn-worker -- "$@"
