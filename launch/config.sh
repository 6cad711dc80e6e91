# If PERSIA_CONFIG is set, unset docker-compose.yaml's default of PERSIA_EMBEDDING_CONFIG, which PERSIA_CONFIG replaces. Also unset the
# default of PERSIA_GLOBAL_CONFIG if that file does not exist. entrypoint.sh reads this script.
if [ -n "${PERSIA_CONFIG:-}" ]; then
    slots=/workspace/config/embedding_config.yml general=/workspace/config/global_config.yml
    [ "${PERSIA_EMBEDDING_CONFIG:-}" != $slots ] || unset PERSIA_EMBEDDING_CONFIG
    [ "${PERSIA_GLOBAL_CONFIG:-}" != $general ] || [ -f $general ] || unset PERSIA_GLOBAL_CONFIG
fi
