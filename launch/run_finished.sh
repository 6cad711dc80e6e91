#!/bin/sh -u
# Whether this job's run is finished, as far as a shell can tell. Where it cannot (the name of the job is quoted, or
# defaulted), the answer is no, and the launcher decides.
summary=${PERSIA_RUN_DIR:-.}/summary.json
job=${PERSIA_JOB:-$(sed -n '/^ *job_name: */{s///;s/[ #].*//;p;q}' "${PERSIA_GLOBAL_CONFIG:-/nowhere}" 2>/dev/null)}
[ -n "$job" ] && grep -qs '"status": "finished"' "$summary" && grep -qF "\"job\": \"$job\"" "$summary"
