#!/bin/sh -eu
# Serve the bundle that PERSIA_BUNDLE names, or the first argument: launch_serving.sh [BUNDLE] [OPTION...].
exec persia serve "$@"
