#!/bin/sh -u
# Exit with 0 if the run of this job is finished. This script does not know the default name of a job. Without a name, it exits
# with 1, and the launcher checks the run.
summary=${PERSIA_RUN_DIR:-.}/summary.json
read_name="/^ *job_name: */{s///;s/[ #].*//;s/^\([\"']\)\(.*\)\1\$/\2/;p;q}"
job=${PERSIA_JOB:-$(sed -n "$read_name" "${PERSIA_GLOBAL_CONFIG:-/nowhere}" 2>/dev/null)}
[ -n "$job" ] && grep -qs '"status": "finished"' "$summary" && grep -qF "\"job\": \"$job\"" "$summary"
