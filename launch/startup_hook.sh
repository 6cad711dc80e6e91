# Run startup-hook.sh of the working directory, if there is one, before training. launch_persia.sh reads this file. If the
# hook fails, the container ends with its exit code, after its output. The hook runs in a shell of its own: it
# installs or checks something, and cannot set variables.
if [ -f startup-hook.sh ]; then
    echo "running $PWD/startup-hook.sh" >&2
    sh -eu startup-hook.sh || {
        code=$?
        printf 'error: %s/startup-hook.sh ended with exit code %s\n  next: correct it, then run it alone: docker compose run --rm --no-deps trainer sh -eu startup-hook.sh\n' "$PWD" "$code" >&2
        exit "$code"
    }
fi
