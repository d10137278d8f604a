#!/usr/bin/env bash
# Trains on GPU nodes under Slurm. The job saves and queues itself again before its time is up or when it is preempted;
# submitting it again while it is queued, or after it has finished, does nothing.
#   launch/slurm.sh submit --name=N --workdir=DIR [OPTIONS] -- --config=NAME [--config.FIELD=V ...]
#   launch/slurm.sh status|logs|cancel --name=N [--workdir=DIR]
# Options:
#   --nodes=1 --gpus=1 (per node) --time=24:00:00 --cpus=8 (per GPU) --partition=P --account=A --constraint=C
#   --grace=180        seconds before the end at which the training is told to save
#   --dry_run          print the exact sbatch command and do nothing
# The repository and DIR lie on a file system that all nodes see; launch/setup.sh's environment has the extra `gpu`:
#   bash -c 'source launch/setup.sh && setup gpu'
set -euo pipefail
name='' workdir='' nodes=1 gpus=1 time=24:00:00 cpus=8 partition='' account='' constraint='' grace=180 dry=no args=()
STOPPED=75 # `pbs train` has saved after a SIGTERM

usage() { sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; }
fail() { echo "slurm.sh: $1" >&2; exit "${2:-1}"; }

job() { # on the first node: sbatch has copied this file, so the repository's place comes in PBS_ROOT
  local code=0 processes=auto
  [ "${SLURM_NTASKS:-1}" -gt 1 ] || processes=1
  srun --kill-on-bad-exit=1 "$PBS_ROOT/.venv/bin/pbs" train "$@" --processes="$processes" || code=$?
  if [ "$code" = "$STOPPED" ]; then
    echo "saved; queued again as the same job"
    scontrol requeue "$SLURM_JOB_ID"
  fi
  exit "$code"
}

action=${1:-}
case $action in
  submit | status | logs | cancel) shift ;;
  job) shift; job "$@" ;;
  -h | --help | help) usage; exit 0 ;;
  *) usage >&2; exit 2 ;;
esac
while [ $# -gt 0 ]; do
  case $1 in
    --) shift; args=("$@"); break ;;
    --dry_run) dry=yes ;;
    --name=* | --workdir=* | --nodes=* | --gpus=* | --time=* | --cpus=* | --partition=* | --account=* | --constraint=* | --grace=*)
      key=${1%%=*}; printf -v "${key#--}" '%s' "${1#*=}" ;;
    --workdir) workdir=${2:-}; shift ;;
    *) fail "$1 is unknown: see launch/slurm.sh --help" 2 ;;
  esac
  shift
done
[ -n "$name" ] || fail '--name=N is needed' 2

queued() { squeue --noheader --me --name="$name" --format='%i %T'; }

submit() {
  [ -n "$workdir" ] || fail '--workdir=DIR is needed: a folder that all nodes see' 2
  [ ${#args[@]} -gt 0 ] || fail 'nothing to train: add -- --config=NAME ...' 2
  local root there command
  root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
  mkdir -p "$workdir"
  workdir="$(cd "$workdir" && pwd)"
  if [ -f "$workdir/handover.json" ]; then
    echo "$name: finished; nothing to do"
    return
  fi
  # One process a GPU, which is how jax.distributed reads Slurm's variables.
  command=(sbatch --parsable --job-name="$name" --nodes="$nodes" --ntasks-per-node="$gpus" --gpus-per-node="$gpus"
    --cpus-per-task="$cpus" --time="$time" ${partition:+--partition="$partition"} ${account:+--account="$account"}
    ${constraint:+--constraint="$constraint"} --requeue --signal="TERM@$grace" --open-mode=append
    --output="$workdir/slurm.log" --export="ALL,PBS_ROOT=$root" "$root/launch/slurm.sh" job
    "${args[@]}" --workdir="$workdir")
  if [ $dry = yes ]; then
    printf '%q ' "${command[@]}"
    echo
    return
  fi
  there=$(queued)
  if [ -n "$there" ]; then
    echo "$name: already in the queue ($there)"
    return
  fi
  echo "$name: job $("${command[@]}")"
}

case $action in
  submit) submit ;;
  status) queued ;;
  logs) tail -n 200 "${workdir:?--workdir=DIR is needed}/slurm.log" ;;
  cancel) scancel --me --name="$name" ;;
esac
