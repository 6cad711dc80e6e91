# Write the first line of every log: the file that runs, whether it is an override, its hash and its build. entrypoint.sh
# reads this file.
file=$(command -v "$runs" || true)
if [ "$runs" = persia_core.so ]; then
    file=$overrides/persia_core.so
    for packaged in /opt/venv/lib/python3*/site-packages/persia_core/*.so; do
        [ -f "$file" ] || file=$packaged
    done
    [ -f "$file" ] || file=
fi
if [ -n "$file" ]; then
    sum=$(sha256sum "$file")
    sum=${sum%% *}
    case $file in
    "${overrides:-/nowhere}"/*) kind=override builds=$overrides/BUILD_INFO ;;
    *) kind=packaged builds=/opt/persia/BUILD_INFO ;;
    esac
    build=$(sed -n "s/^$sum .* build=//p" "$builds" 2>/dev/null || true)
    printf 'running %s: %s sha256=%s build=%s\n' "$file" "$kind" "$sum" "${build:-unknown}" >&2
fi
