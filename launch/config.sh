# With PERSIA_CONFIG, drop docker-compose.yaml's defaults: of PERSIA_EMBEDDING_CONFIG, whose place it takes, and of
# PERSIA_GLOBAL_CONFIG, if there is no such file. entrypoint.sh reads this file.
if [ -n "${PERSIA_CONFIG:-}" ]; then
    slots=/workspace/config/embedding_config.yml general=/workspace/config/global_config.yml
    [ "${PERSIA_EMBEDDING_CONFIG:-}" != $slots ] || unset PERSIA_EMBEDDING_CONFIG
    [ "${PERSIA_GLOBAL_CONFIG:-}" != $general ] || [ -f $general ] || unset PERSIA_GLOBAL_CONFIG
fi
