#!/bin/sh -eu
# Serve the bundle in PERSIA_BUNDLE or in the first argument: launch_serving.sh [BUNDLE] [OPTION...].
exec persia serve "$@"
