#!/usr/bin/env bash
# What launch/tpu.sh runs on each worker of a TPU VM:
#   tpu_worker.sh install                        a Python >= 3.12 and the environment
#   tpu_worker.sh start REMOTE SHARED TRAIN...   `pbs train TRAIN...`, detached; nothing when one is running
#   tpu_worker.sh run   REMOTE SHARED TRAIN...   the same in the foreground
#   tpu_worker.sh stop                           asks the running training to save and end
# REMOTE is the run's gs:// folder, SHARED a folder that all hosts see, or - with one host. Before the training the run's
# folder comes from REMOTE, and what its config names on gs:// from there; while it trains, worker 0 copies the run's folder
# to REMOTE every PBS_SYNC_SECONDS (60).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
takes 1 "$@"
HERE=${PBS_RUN_DIR:-$HOME/pbs_run}
# Orbax writes this file of a checkpoint last, and pbs_jax handover.json of a run: they are copied last, too.
LAST='.*(commit_success\.txt|handover\.json)$'
SKIP='.*(orbax-checkpoint-tmp|\.part$|\.tmp$|exit_code$)'

is_first() { [[ ${PBS_WORKER:-$(hostname)} =~ (-w-|^)0$ || ! ${PBS_WORKER:-$(hostname)} =~ (-w-|^)[0-9]+$ ]]; }

upload() {
  gcloud storage rsync --recursive --exclude="$SKIP|$LAST" "$1" "$2" &&
    gcloud storage rsync --recursive --delete-unmatched-destination-objects --exclude="$SKIP" "$1" "$2"
}

install() {
  export PATH="$HOME/.local/bin:$PATH"
  if ! find_python >/dev/null 2>&1; then # the images bring an older one
    python3 -m pip install --user --quiet uv
    uv python install 3.12
  fi
  setup tpu
}

bring() { # data and finished phases on gs:// are copied to this host; sets `train`
  local argument address folder
  train=()
  for argument in "$@"; do
    if [[ $argument == --config.*=gs://* ]]; then
      address=${argument#*=}
      folder=$HERE/inputs/$(basename "$address")-$(cksum <<<"$address" | cut -d' ' -f1)
      mkdir -p "$folder"
      gcloud storage rsync --recursive "$address" "$folder"
      argument=${argument%%=*}=$folder
    fi
    train+=("$argument")
  done
}

restore() { # $1 remote, $2 workdir. An error must not pass for a new run: the next upload would delete what is there
  local said
  if said=$(gcloud storage ls "$1/config.json" 2>&1); then
    gcloud storage rsync --recursive "$1" "$2"
  elif [[ $said == *'matched no objects'* ]]; then
    echo "a new run: $1 is empty"
  else
    echo "$1 cannot be read: $said" >&2
    return 1
  fi
}

run() {
  local remote=$1 shared=$2 workdir=$HERE/workdir log=$HERE/train.log code=0 pid syncing=''
  shift 2
  mkdir -p "$HERE"
  exec 9>"$HERE/lock"
  if ! flock --nonblock 9; then
    echo "a training is running here already"
    return
  fi
  bring "$@"
  [ "$shared" = - ] || workdir=$shared/$(basename "$(dirname "$remote")")
  mkdir -p "$workdir"
  if is_first; then
    restore "$remote" "$workdir"
    rm -f "$workdir/exit_code"
    log=$workdir/train.log
    (while date +%s >"$workdir/heartbeat"; do
      upload "$workdir" "$remote" || echo 'the upload failed; it is tried again'
      sleep "${PBS_SYNC_SECONDS:-60}"
    done) 9>&- &
    syncing=$!
  fi
  "$(find_pbs)" train "${train[@]}" --workdir="$workdir" --processes="${PBS_PROCESSES:-auto}" \
    >>"$log" 2>&1 9>&- &
  pid=$!
  echo $pid >"$HERE/pid"
  trap 'kill -TERM "$pid"' TERM INT
  while kill -0 "$pid" 2>/dev/null; do wait "$pid" || true; done # a signal ends the wait, not the training
  wait "$pid" || code=$?
  if is_first; then
    kill "$syncing"
    wait "$syncing" || true
    upload "$workdir" "$remote"
    echo "$code" >"$HERE/exit_code"
    gcloud storage cp "$HERE/exit_code" "$remote/exit_code" # what tpu.sh waits for: after everything else
  fi
  return "$code"
}

case ${1:-} in
  install) install ;;
  run) shift; run "$@" ;;
  start)
    shift
    mkdir -p "$HERE"
    setsid nohup bash "${BASH_SOURCE[0]}" run "$@" </dev/null >>"$HERE/worker.log" 2>&1 &
    echo "started; log: $HERE/train.log" ;;
  stop) kill -TERM "$(cat "$HERE/pid")" ;;
  *) usage >&2; exit 2 ;;
esac
