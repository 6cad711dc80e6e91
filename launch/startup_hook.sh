# Before training, run startup-hook.sh of the working directory if it exists. launch_persia.sh reads this file. If the
# hook fails, the container prints the output of the hook and ends with its exit code. The hook runs in a separate shell, so it
# can install packages or check conditions, but cannot set variables for the training.
if [ -f startup-hook.sh ]; then
    echo "running $PWD/startup-hook.sh" >&2
    sh -eu startup-hook.sh || {
        code=$?
        printf 'error: %s/startup-hook.sh ended with exit code %s\n  next: correct it; to run it alone with compose: docker compose run --rm --no-deps trainer sh -eu startup-hook.sh\n' "$PWD" "$code" >&2
        exit "$code"
    }
fi
