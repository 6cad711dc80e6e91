#!/bin/sh -eu
# A data-compose replica: launch_compose.sh [SCRIPT [ARGUMENT...]]. SCRIPT defaults to PERSIA_DATALOADER_ENTRY.
exec persia-launcher data-loader -- "$@"
