# Create the secret of the stack if it does not exist. All processes derive their tokens from it. entrypoint.sh reads this file.
# Several containers may create the secret at the same time: `ln` creates the complete file, or fails because the file exists.
token=${PERSIA_TOKEN_FILE:-}
if [ -n "$token" ] && [ ! -s "$token" ]; then
    new=$(mktemp "$token.XXXXXX") || fail 5 "$token is missing or empty, and user $(id -u):$(id -g) cannot create it" \
        "mount a folder that this user may write to, or a secret of 32 bytes or more"
    od -A n -N 32 -t x1 /dev/urandom | tr -d ' \n' >"$new"
    chmod 0444 "$new"
    sync "$new"
    if ! error=$(ln "$new" "$token" 2>&1) && [ ! -s "$token" ]; then
        [ ! -e "$token" ] || fail 5 "$token is empty" "remove this file; a new secret is created at the next start"
        fail 5 "cannot create $token: ${error##*: }" "mount a folder that supports hard links, or a secret of 32 bytes or more"
    fi
    rm -f "$new"
fi
