#!/bin/sh -eu
# A data-compose worker: launch_compose.sh [SCRIPT [ARGUMENT...]], by default PERSIA_DATALOADER_ENTRY.
exec persia-launcher data-loader -- "$@"
