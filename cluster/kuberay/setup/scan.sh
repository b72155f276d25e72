#!/bin/bash
# The job of a scheduler that counts every exit code but 0 as a failure: KubeRay, `ray job submit` and Slurm call it.
#
#     bash scan.sh                                          the scan of this ISO week
#     bash scan.sh AUDIT.YAML [options of seenset run]      another audit
#
# Variables of the scan of a week: SEENSET_AUDIT (/etc/seenset/audit.yaml), and SEENSET_SCANS, in which each ISO week has
# a run directory, so that a retry on a new cluster, or a second job of the week, resumes what the week has.
# 4 and 5 (something was selected) end with 0, and status.json keeps them. All other codes stay: after 3 (incomplete) a
# retry resumes.
set -u
if [ $# -eq 0 ]; then
    week=$(date -u +%G-W%V)
    set -- "${SEENSET_AUDIT:-/etc/seenset/audit.yaml}" \
        --set "run=${SEENSET_SCANS:-s3://BUCKET/scans}/$week" --fail-if-selected
fi

audit='' stopped=no
# shellcheck disable=SC2329 # called by the trap
stop() {
    stopped=yes
    [ -z "$audit" ] || kill -TERM "$audit" 2>/dev/null
}
trap stop TERM INT
seenset run "$@" &
audit=$!
[ $stopped = no ] || stop # a signal before there was a process

wait "$audit"
code=$?
while [ $stopped = yes ]; do # the signal ended the wait, and not the audit
    stopped=no
    wait "$audit"
    again=$?
    [ $again -eq 127 ] || code=$again # 127: the wait before was the last one
done
case $code in 4 | 5) exit 0 ;; *) exit "$code" ;; esac
