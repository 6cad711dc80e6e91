#!/bin/sh -u
# Whether this job's run is finished, as far as a shell can tell. Where it cannot (the name of the job is defaulted), the
# answer is no, and the launcher decides.
summary=${PERSIA_RUN_DIR:-.}/summary.json
read_name="/^ *job_name: */{s///;s/[ #].*//;s/^\([\"']\)\(.*\)\1\$/\2/;p;q}"
job=${PERSIA_JOB:-$(sed -n "$read_name" "${PERSIA_GLOBAL_CONFIG:-/nowhere}" 2>/dev/null)}
[ -n "$job" ] && grep -qs '"status": "finished"' "$summary" && grep -qF "\"job\": \"$job\"" "$summary"
