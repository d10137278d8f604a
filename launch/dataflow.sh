#!/usr/bin/env bash
# Prepares data on Google Dataflow: `pbs data run` here hands its units to Dataflow's workers by Apache Beam and waits.
#   launch/dataflow.sh --project=P --region=R --bucket=gs://B/DIR --image=IMAGE [OPTIONS] -- --source slides --root DIR --out DIR ...
# A unit reads and leaves files, so --root and --out lie on a share that this machine and all workers see under one path:
# IMAGE holds this package and mounts the share when it starts. Dataflow itself mounts nothing, and ArrayRecord cannot write
# to gs://. Where no image may mount, use VMs and --shard: launch/README.md, "Data preparation on many machines".
# Options:
#   --project=P  --region=R  --bucket=gs://B/DIR (Beam's temporary files, no data)  --image=IMAGE (of the workers)
#   --subnetwork=regions/R/subnetworks/S (the share's)  --workers=8 (at most)  --machine=n1-standard-4  --name=pbs-data
#   --dry_run          print the exact command and do nothing      --yes  ask nothing
# It asks before it starts what costs money. Run again it goes on: finished units stay. Needs pip install "apache-beam[gcp]".
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
project='' region='' bucket='' image='' subnetwork='' workers=8 machine=n1-standard-4 name=pbs-data args=()

takes 0 "$@"
while [ $# -gt 0 ]; do
  case $1 in
    --) shift; args=("$@"); break ;;
    --dry_run) dry=yes ;;
    --yes) yes=yes ;;
    --project=* | --region=* | --bucket=* | --image=* | --subnetwork=* | --workers=* | --machine=* | --name=*)
      key=${1%%=*}; printf -v "${key#--}" '%s' "${1#*=}" ;;
    *) fail "$1 is unknown: see launch/dataflow.sh --help" 2 ;;
  esac
  shift
done
for key in project region image; do [ -n "${!key}" ] || fail "--$key=VALUE is needed: see launch/dataflow.sh --help" 2; done
[[ $bucket =~ ^gs://[^/]+ ]] || fail "--bucket=\"$bucket\": give gs://BUCKET/FOLDER, for Beam's temporary files" 2
[ ${#args[@]} -gt 0 ] || fail 'nothing to prepare: add -- --source slides --root DIR --out DIR' 2
[[ "${args[*]}" != *gs://* ]] || fail "${args[*]}: units are files, so give folders of a share that all workers see, not gs://" 2

printf -v beam '%q ' --runner=DataflowRunner --project="$project" --region="$region" --job_name="$name" \
  --temp_location="${bucket%/}/temp" --staging_location="${bucket%/}/staging" --sdk_container_image="$image" \
  --sdk_location=container --worker_machine_type="$machine" --max_num_workers="$workers" \
  ${subnetwork:+--subnetwork="$subnetwork"}
pbs=$(find_pbs)
confirm "Starts up to $workers $machine workers in $region ($project), which cost money until the job ends."
do_it "$pbs" data run "${args[@]}" --beam "${beam% }"
