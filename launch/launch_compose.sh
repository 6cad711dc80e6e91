#!/bin/sh -eu
# A data-compose replica: launch_compose.sh [SCRIPT [ARGUMENT...]]. SCRIPT defaults to PERSIA_DATALOADER_ENTRY. If neither
# is set, the rows of PERSIA_CONFIG are sent; without PERSIA_CONFIG, data_compose.py runs.
[ $# -gt 0 ] || [ -n "${PERSIA_CONFIG:-}${PERSIA_DATALOADER_ENTRY:-}" ] || set -- data_compose.py
exec persia-launcher data-loader -- "$@"
