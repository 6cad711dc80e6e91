#!/bin/sh -eu
# Run the tests in the image, against the running stack: run_pytest.sh [ARGUMENT...]. pytest prints the name of each test when
# it starts, and counts it when it ends. Temporary files go to a volume, because /tmp is mounted noexec.
echo "collecting tests; the first import of PyTorch may take a minute" >&2
cd /opt/persia
export PERSIA_TEST_LIVE="${PERSIA_TEST_LIVE-1}"
export PYTEST_ADDOPTS="-p no:cacheprovider --verbose -o console_output_style=count ${PYTEST_ADDOPTS-}"
[ -z "${PERSIA_RUN_DIR-}" ] || export PYTEST_DEBUG_TEMPROOT="$PERSIA_RUN_DIR"
exec pytest "$@"
