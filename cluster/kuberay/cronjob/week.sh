#!/bin/bash
# bash week.sh RAYJOB.yaml: creates the RayJob of this ISO week and waits for its end. The CronJob runs it.
#
# The RayJob is named after the week, so a pod that starts again finds what its predecessor created. Exit codes: 0
# complete; 1 failed; 2 the RayJob is refused or was deleted; 75 the API of Kubernetes did not answer for half an hour.
set -u
trap 'exit 143' TERM
name=seenset-$(date -u +%G-w%V) # as in scan.sh, but in lower case
owner=''
[ -z "${JOB_UID:-}" ] || # the removal of the Job removes its RayJob
    owner='{"apiVersion": "batch/v1", "kind": "Job", "name": "'$JOB_NAME'", "uid": "'$JOB_UID'"}'

create() {
    kubectl patch --local --filename "$1" --type merge --output yaml \
        --patch '{"metadata": {"name": "'"$name"'", "ownerReferences": ['"$owner"']}}' | kubectl create --filename -
}

created=no unanswered=0 refusals=0 last=''
while :; do
    if ! found=$(kubectl get rayjobs.ray.io "$name" --ignore-not-found \
        --output 'jsonpath={.metadata.name} {.status.jobDeploymentStatus} {.status.reason} {.status.message}'); then
        unanswered=$((unanswered + 1)) # control planes are upgraded
        [ $unanswered -lt 120 ] || exit 75
    elif [ -n "$found" ]; then
        created=yes unanswered=0
        read -r _ state _ <<<"$found"
        [ "$found" = "$last" ] || echo "${found//$'\n'/ }"
        last=$found
        case $state in
            Complete) exit 0 ;;
            Failed | ValidationFailed) exit 1 ;;
        esac
    elif [ $created = yes ]; then
        echo "$name was deleted before its end; what it finished is in its run directory" >&2
        exit 2
    elif [ $refusals -eq 3 ]; then
        exit 2 # kubectl has stated why
    else
        unanswered=0
        create "$1" || refusals=$((refusals + 1)) # AlreadyExists is found by the next request
    fi
    sleep 15
done
