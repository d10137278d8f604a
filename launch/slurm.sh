#!/usr/bin/env bash
# Trains on GPU nodes under Slurm. The job saves and queues itself again before its time is up or when it is preempted;
# submitting it again while it is queued, or after it has finished, does nothing.
#   launch/slurm.sh submit --name=N --workdir=DIR [OPTIONS] -- --config=NAME [--config.FIELD=V ...]
#   launch/slurm.sh status|logs|cancel --name=N [--workdir=DIR]
# Options:
#   --nodes=1 --gpus=1 (per node) --time=24:00:00 --cpus=8 (per GPU) --partition=P --account=A --constraint=C
#   --grace=180        seconds before the end at which the training is told to save
#   --dry_run          print the exact command and do nothing      --yes  ask nothing
# It reads the training's config and its files here before it submits, and asks before it cancels.
# The repository and DIR lie on a file system that all nodes see; launch/setup.sh's environment has the extra `gpu`:
#   bash -c 'source launch/setup.sh && setup gpu'
set -euo pipefail
# In a job sbatch has copied this file, so that the repository's place comes in PBS_ROOT.
# shellcheck source=setup.sh
source "${PBS_ROOT:-$(dirname "${BASH_SOURCE[0]}")/..}/launch/setup.sh"
name='' workdir='' nodes=1 gpus=1 time=24:00:00 cpus=8 partition='' account='' constraint='' grace=180 args=()
STOPPED=75 # `pbs train` has saved after a SIGTERM

job() { # on the first node
  local code=0 processes=auto
  [ "${SLURM_NTASKS:-1}" -gt 1 ] || processes=1
  srun --kill-on-bad-exit=1 "$VENV/bin/pbs" train "$@" --processes="$processes" || code=$?
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
    --yes) yes=yes ;;
    --name=* | --workdir=* | --nodes=* | --gpus=* | --time=* | --cpus=* | --partition=* | --account=* | --constraint=* | --grace=*)
      key=${1%%=*}; printf -v "${key#--}" '%s' "${1#*=}" ;;
    --workdir) workdir=${2:-}; shift ;;
    *) fail "$1 is unknown: see launch/slurm.sh --help" 2 ;;
  esac
  shift
done
[ -n "$name" ] || fail '--name=N is needed' 2

queued() { do_it squeue --noheader --me --name="$name" --format='%i %T'; }

submit() {
  [ -n "$workdir" ] || fail '--workdir=DIR is needed: a folder that all nodes see' 2
  [ ${#args[@]} -gt 0 ] || fail 'nothing to train: add -- --config=NAME ...' 2
  local there command
  [[ $workdir == /* ]] || workdir=$PWD/$workdir
  if [ -f "$workdir/handover.json" ]; then
    echo "$name: finished; nothing to do"
    return
  fi
  "$(find_pbs)" train "${args[@]}" --workdir="$workdir" --check_only=here || fail 'nothing was submitted' 2
  # One process a GPU, which is how jax.distributed reads Slurm's variables.
  command=(sbatch --parsable --job-name="$name" --nodes="$nodes" --ntasks-per-node="$gpus" --gpus-per-node="$gpus"
    --cpus-per-task="$cpus" --time="$time" ${partition:+--partition="$partition"} ${account:+--account="$account"}
    ${constraint:+--constraint="$constraint"} --requeue --signal="TERM@$grace" --open-mode=append
    --output="$workdir/slurm.log" --export="ALL,PBS_ROOT=$ROOT" "$ROOT/launch/slurm.sh" job
    "${args[@]}" --workdir="$workdir")
  if [ $dry = yes ]; then
    do_it "${command[@]}"
    return
  fi
  mkdir -p "$workdir"
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
  logs) do_it tail -n 200 "${workdir:?--workdir=DIR is needed}/slurm.log" ;;
  cancel) confirm "Cancels all your jobs named $name."; do_it scancel --me --name="$name" ;;
esac
