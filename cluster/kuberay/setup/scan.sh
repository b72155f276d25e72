# The entry point of a scan. Its run directory is named after the ISO week, so a retry on a new cluster, or a second
# job of the same week, goes on with what the week has. 3 (incomplete) stays an error: a retry is what it needs.
# 4 and 5 (something was selected) are no error of the job; status.json keeps them.
set -eu
scans=${SEENSET_SCANS:-s3://BUCKET/scans}
audit=${SEENSET_AUDIT:-/etc/seenset/audit.yaml}
exec seenset run "$audit" --set "run=$scans/$(date -u +%G-W%V)" --fail-if-selected --exit-zero-on 4,5
