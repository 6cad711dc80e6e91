# Makes the secret of the stack, from which all parts derive their tokens, if there is none. Read by entrypoint.sh. Several
# containers may do this at once: the link appears whole, or it existed before.
token=${PERSIA_TOKEN_FILE:-}
if [ -n "$token" ] && [ ! -s "$token" ]; then
    new=$(mktemp "$token.XXXXXX") || fail 5 "$token is missing and $(id -u):$(id -g) cannot make it" \
        "mount a folder that this user may write to, or a token of 32 bytes or more"
    od -A n -N 32 -t x1 /dev/urandom | tr -d ' \n' >"$new"
    chmod 0444 "$new"
    sync "$new"
    ln "$new" "$token" 2>/dev/null || [ -s "$token" ] || fail 5 "$token is empty" "remove it; a new one is made"
    rm -f "$new"
fi
