#!/usr/bin/env bash
# Trains on a Cloud TPU VM. One command does all of it, and can be run again at any time to go on:
#   launch/tpu.sh train --name=N --zone=Z --type=v5litepod-8 --bucket=gs://B/runs -- --config=NAME [--config.FIELD=V ...]
# Its parts, each a command of its own:
#   create   a TPU VM, or a queued resource with --queued (--spot for either); waits until it is there
#   install  this repository and its environment on every worker
#   run      `pbs train` on every worker, detached; checkpoints and logs go to BUCKET/NAME
#   watch    until the run ends; makes the machine anew after a preemption and continues from the bucket
#   status, logs, fetch (the run's folder to --fetch), stop (saves first), delete
# Options:
#   --name=N           of the machine and of the run's folder in the bucket
#   --zone=Z  --project=P (default: gcloud's own)  --type=v5litepod-8  --version=RUNTIME (default: by type)
#   --bucket=gs://B/DIR  --fetch=DIR (default runs/NAME)  --spot  --queued  --poll=30 (s)  --restarts=20
#   --stale=900        seconds without a sign of life after which the training is started again
#   --shared_dir=DIR   a folder that all hosts see; slices of several hosts need it for their checkpoints
#   --before=COMMAND   run on every worker before the training, to mount that folder, say; without it the training may
#                      name addresses on gs:// only
#   --keep             leave the machine when the run is finished (`train` deletes it)
#   --dry_run          print the exact commands and do nothing      --yes  ask nothing
# It reads the training's config here before anything is made, and asks before it makes something that costs money and
# before it deletes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
name='' zone='' project='' type=v5litepod-8 version='' bucket='' fetch='' shared='' before=''
queued=no keep=no poll=30 restarts=20 stale=900 spot=() args=()

say() { echo ">> $1"; }

action=${1:-}
case $action in
  create | install | run | watch | status | logs | fetch | stop | delete | train) shift ;;
  -h | --help | help) usage; exit 0 ;;
  *) usage >&2; exit 2 ;;
esac
while [ $# -gt 0 ]; do
  case $1 in
    --) shift; args=("$@"); break ;;
    --spot) spot=(--spot) ;;
    --queued) queued=yes ;;
    --keep) keep=yes ;;
    --dry_run) dry=yes ;;
    --yes) yes=yes ;;
    --name=* | --zone=* | --project=* | --type=* | --version=* | --bucket=* | --fetch=* | --before=* | --poll=* | --restarts=* | --stale=*)
      key=${1%%=*}; printf -v "${key#--}" '%s' "${1#*=}" ;;
    --shared_dir=*) shared=${1#*=} ;;
    --fetch) fetch=${2:-}; shift ;;
    *) fail "$1 is unknown: see launch/tpu.sh --help" 2 ;;
  esac
  shift
done
[[ $name =~ ^[a-z]([a-z0-9-]{0,60}[a-z0-9])?$ ]] || fail "--name=\"$name\": give lower case letters, digits, hyphens" 2
[ -n "$zone" ] || fail '--zone=Z is needed, for example --zone=us-west4-a' 2
[[ $bucket =~ ^gs://[^/]+ ]] || fail "--bucket=\"$bucket\": give gs://BUCKET/FOLDER, where checkpoints and logs go" 2
case $action in run | train) [ ${#args[@]} -gt 0 ] || fail 'nothing to train: add -- --config=NAME ...' 2 ;; esac
fetch=${fetch:-runs/$name} remote=${bucket%/}/$name
if [ -z "$version" ]; then
  case $type in
    v5litepod-*) version=v2-alpha-tpuv5-lite ;;
    v5p-*) version=v2-alpha-tpuv5 ;;
    v6e-*) version=v2-alpha-tpuv6e ;;
    v[234]-*) version=tpu-ubuntu2204-base ;;
    *) fail "--type=$type: name its runtime with --version" 2 ;;
  esac
fi
where=(--zone="$zone" ${project:+--project="$project"})
vm=(gcloud compute tpus tpu-vm) queue=(gcloud compute tpus queued-resources)
describe=("${vm[@]}" describe "$name" "${where[@]}" --format='value(state)')
[ $queued = no ] || describe=("${queue[@]}" describe "$name" "${where[@]}" --format='value(state.state)')

check() { # what the machine would find wrong with the training after it is paid for
  local argument pbs reach=gs
  for argument in "${args[@]}"; do
    [[ ! $argument =~ ^--(no)?config[^=]*$ ]] || fail "$argument: write it as one word, $argument=VALUE" 2
  done
  # More than eight chips (v2 to v4, v5p: cores) are more than one host.
  [[ ${type##*-} =~ ^[0-9]+$ && ${type##*-} -gt 8 ]] && [ -z "$shared" ] &&
    fail "$type has several hosts, which write one checkpoint together: give --shared_dir, a folder that all see" 2
  pbs=$(find_pbs)
  [ -z "$before" ] || reach=mounted
  "$pbs" train "${args[@]}" --workdir="$remote/run" --check_only=$reach || fail 'nothing was started' 2
}

state() { # up | wait | gone | failed | absent | unknown
  local found errors
  errors=$(mktemp)
  found=$("${describe[@]}" 2>"$errors") || found=error:$(<"$errors")
  rm -f "$errors"
  case $found in
    READY | ACTIVE) echo up ;;
    PREEMPTED | TERMINATED | STOPPED | STOPPING | SUSPENDED | SUSPENDING | DELETING) echo gone ;;
    FAILED) echo failed ;;
    error:*NOT_FOUND* | error:*'not found'* | error:*'not be found'*) echo absent ;;
    error:*) echo "tpu.sh: $found" >&2; echo unknown ;; # the network, or no access: asked again
    *) echo wait ;;
  esac
}

on_all() { # runs $1 on every worker
  do_it "${vm[@]}" ssh "$name" "${where[@]}" --worker=all --command="$1"
}

create() {
  local now=absent
  [ $dry = yes ] || now=$(state)
  case $now in
    up) say "$name is there"; return ;;
    gone | failed) remove ;;
    unknown) return 1 ;;
  esac
  if [ "$now" != wait ]; then
    say "creating $name: $type in $zone"
    if [ $queued = yes ]; then
      do_it "${queue[@]}" create "$name" --node-id="$name" "${where[@]}" --accelerator-type="$type" \
        --runtime-version="$version" "${spot[@]}"
    else
      do_it "${vm[@]}" create "$name" "${where[@]}" --accelerator-type="$type" --version="$version" "${spot[@]}"
    fi
  fi
  [ $dry = yes ] && return
  while now=$(state); [ "$now" != up ]; do
    case $now in failed | gone | absent) return 1 ;; esac
    say "$name: $now, next look in $poll s"
    sleep "$poll"
  done
}

remove() {
  say "deleting $name"
  if [ $queued = yes ]; then
    do_it "${queue[@]}" delete "$name" "${where[@]}" --force --quiet
  else
    do_it "${vm[@]}" delete "$name" "${where[@]}" --quiet
  fi
}

install() {
  say "installing this repository on every worker"
  local archive=/tmp/pbs_jax.tar.gz
  [ $dry = yes ] || archive=$(mktemp -d)/pbs_jax.tar.gz
  { do_it tar -C "$ROOT" --exclude=__pycache__ -czf "$archive" \
    pyproject.toml README.md LICENSE pbs_jax data_prep configs launch || [ $? = 1 ]; } && # 1: a folder changed meanwhile
    do_it gcloud storage cp "$archive" "$remote/pbs_jax.tar.gz" &&
    on_all "mkdir -p ~/pbs_jax && gcloud storage cp $remote/pbs_jax.tar.gz ~/pbs_jax.tar.gz &&
tar -C ~/pbs_jax -xzf ~/pbs_jax.tar.gz && bash ~/pbs_jax/launch/tpu_worker.sh install"
}

run() {
  local line hosts=1
  if [ $dry = no ]; then
    hosts=$("${vm[@]}" describe "$name" "${where[@]}" --format='value(networkEndpoints.len())') || return 1
    [[ $hosts =~ ^([2-9]|[1-9][0-9]+)$ ]] && [ -z "$shared" ] &&
      fail "$type has $hosts hosts, which write one checkpoint together: give --shared_dir, a folder that all see; $name is kept and costs money"
  fi
  say "starting the training on every worker"
  do_it gcloud storage rm --quiet "$remote/run/exit_code" 2>/dev/null || true # of an earlier start
  printf -v line '%q ' bash pbs_jax/launch/tpu_worker.sh start "$remote/run" "${shared:--}" "${args[@]}"
  on_all "${before:+$before && }$line"
}

exit_code() { gcloud storage cat "$remote/run/exit_code" 2>/dev/null || true; }

show_log() { do_it gcloud storage cat "$remote/run/train.log" | tail -n "${1:-200}"; }

status() {
  if [ $dry = yes ]; then
    do_it gcloud storage cat "$remote/run/exit_code"
    do_it "${describe[@]}"
  else
    echo "machine: $(state), exit code of the run: $(exit_code)"
  fi
}

watch() {
  local code now beat last='' seen=$SECONDS
  if [ $dry = yes ]; then
    say "then every $poll s: is there an exit code, is the machine up, has the run given a sign of life?"
    status
    return
  fi
  while :; do
    code=$(exit_code)
    case $code in
      0) say 'finished'; return ;;
      75) again 'the run was stopped and saved' ;;
      '')
        now=$(state) beat=$(gcloud storage cat "$remote/run/heartbeat" 2>/dev/null || true)
        [ "$beat" = "$last" ] || last=$beat seen=$SECONDS
        if [ "$now" != up ] && [ "$now" != unknown ]; then
          again "the machine is $now"
          seen=$SECONDS
        elif [ $((SECONDS - seen)) -gt "$stale" ]; then
          again "no sign of life for $stale s"
          seen=$SECONDS
        else
          say "$name: $now, training"
        fi ;;
      *)
        show_log 20 >&2
        fail "the training ended with exit code $code (log: $remote/run/train.log); $name is kept and costs money: delete it" ;;
    esac
    sleep "$poll"
  done
}

again() { # $1: why. Makes the machine anew when it is gone, and goes on from the bucket.
  local why=$1
  while :; do
    [ "$left" -gt 0 ] || fail "$why, and all $restarts restarts are used up: run the same command to go on"
    left=$((left - 1))
    say "$why: starting again ($left restarts left)"
    if create && install && run; then return; fi
    why="$name cannot be started"
    sleep "$poll"
  done
}

get() {
  say "fetching $remote/run to $fetch"
  do_it mkdir -p "$fetch"
  do_it gcloud storage rsync --recursive "$remote/run" "$fetch"
}

left=$restarts
[ ${#args[@]} = 0 ] || check
case $action in
  create) confirm "Creates $type ($name), which costs money until it is deleted."; create || fail "$name was not made" ;;
  install) install ;;
  run) run ;;
  watch) watch ;;
  status) status ;;
  logs) show_log ;;
  fetch) get ;;
  stop) on_all 'bash pbs_jax/launch/tpu_worker.sh stop' ;;
  delete) confirm "Deletes $name; what is not in $remote is lost."; remove ;;
  train)
    confirm "Creates $type ($name), which costs money until the run is finished."
    if [ $dry = yes ] || [ "$(exit_code)" != 0 ]; then
      create || fail "$name was not made: see above; with --queued it waits for its turn"
      { install && run; } || again "$name cannot be started"
      watch
    fi
    get
    if [ $keep = no ] && { [ $dry = yes ] || [ "$(state)" != absent ]; }; then remove; fi ;;
esac
