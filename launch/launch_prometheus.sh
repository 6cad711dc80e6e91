#!/bin/sh -eu
# Prometheus. Rank N of a trainer container has port 9464 + N, so the line of the trainer is repeated for each further rank. With
# TLS, `serving` is scraped over https.
config=${TMPDIR:-/tmp}/prometheus.yml
awk -v ranks="${GPU_NUM:-0}" -v tls="${PERSIA_TLS_CERT:-}" -v ca="${PERSIA_TLS_CA:-}" -v name="${PERSIA_TLS_NAME:-persia}" '
    { print }
    /names: \[trainer\]/ {
        for (rank = 1; rank < ranks; rank++) {
            line = $0
            sub(/9464/, 9464 + rank, line)
            print line
        }
    }
    /job_name: persia-serving/ && tls != "" {
        printf "    scheme: https\n    tls_config: {server_name: %s%s}\n", name, ca == "" ? "" : ", ca_file: " ca
    }
' "${PROMETHEUS_CONFIG:-/etc/persia/prometheus.yml}" >"$config"
exec prometheus --config.file="$config" --storage.tsdb.path=/prometheus --storage.tsdb.retention.time="${RETENTION:-15d}" \
    --web.listen-address=0.0.0.0:9090 "$@"
