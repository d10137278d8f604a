# shellcheck shell=bash
# Sourced by the other scripts, never run. `setup EXTRA...` makes VENV ready: finds Python >= 3.12, creates the environment,
# installs pbs-jax with these extras at the tested versions, and does nothing when that has been done before.
# PBS_PYTHON names an interpreter, PBS_VENV another place for the environment, PBS another `pbs`.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${PBS_VENV:-$ROOT/.venv}"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONUNBUFFERED=1

dry=no yes=no # of --dry_run and --yes, where a script takes them

say() { printf '\n== %s\n' "$*"; }

fail() { echo "$(basename "$0"): $1" >&2; exit "${2:-1}"; }

usage() { sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "$0"; } # the head of the script that runs

takes() { # LEAST "$@": prints the usage for --help; with fewer arguments than LEAST, or an option among them, fails with it
  local least=$1
  shift
  case ${1:-} in
    -h | --help | help) usage; exit 0 ;;
    -*) [ "$least" = 0 ] ;;
    *) [ $# -ge "$least" ] ;;
  esac || { usage >&2; exit 2; }
}

do_it() { # runs a command, or prints it
  if [ $dry = yes ]; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}

confirm() { # $1: what happens
  [ $dry = yes ] || [ $yes = yes ] && return
  [ -t 0 ] || fail "$1 Nobody can be asked here: add --yes" 2
  local answer
  read -r -p "$1 Go on? [y/N] " answer
  [[ $answer =~ ^[yY](es)?$ ]] || fail 'nothing was done'
}

find_pbs() { # the environment that these scripts make, else whatever `pbs` is on the PATH
  local candidate
  for candidate in ${PBS:+"$PBS"} "$VENV/bin/pbs" pbs; do
    command -v "$candidate" && return
  done
  fail "no pbs command: run bash -c 'source launch/setup.sh && setup test', or name one in PBS"
}

usable() { # a Python >= 3.12 that can make environments; a pyenv shim may exist and still not run
  "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

find_python() {
  local candidate
  for candidate in ${PBS_PYTHON:+"$PBS_PYTHON"} python3.12 python3.13 python3 python3.14 \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python \
    "$(uv python find --no-python-downloads '>=3.12' 2>/dev/null || true)"; do
    if [ -n "$candidate" ] && usable "$candidate"; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return
    fi
  done
  echo "no Python >= 3.12 with venv found: install one (python.org, pyenv, uv) or name it in PBS_PYTHON" >&2
  return 1
}

fingerprint() { cat "$ROOT/pyproject.toml" "$ROOT/launch/constraints.txt" | cksum; }

installed() { # are all extras in VENV, at the versions these files say?
  local extra
  for extra in "$@"; do
    [ "$(cat "$VENV/.installed-$extra" 2>/dev/null)" = "$(fingerprint)" ] || return 1
  done
  [ -x "$VENV/bin/pbs" ] && "$VENV/bin/python" -c '' 2>/dev/null
}

room() { # all extras install in 7.7 GB, with their archives beside them meanwhile; pip finds out at the very end
  local need=12 free
  case " $* " in *" test "* | *" demo "* | *" gpu "*) ;; *) need=4 ;; esac
  free=$(($(df -Pk "$VENV" | awk 'END { print $4 }') / 1000000))
  [ "$free" -ge $need ] || fail "installing $* needs $need GB of disk, $free are free at $VENV: free some, or name another place in PBS_VENV"
}

setup() {
  local extra start=$SECONDS log pid python
  installed "$@" && return
  if ! usable "$VENV/bin/python"; then
    python="$(find_python)"
    say "environment: $VENV from $python"
    "$python" -m venv --clear "$VENV"
  fi
  room "$@"
  log="$VENV/install.log"
  say "installing pbs-jax[$(IFS=,; echo "$*")]: minutes the first time (log: $log)"
  "$VENV/bin/python" -m pip install --progress-bar off -c "$ROOT/launch/constraints.txt" \
    -e "${ROOT}[$(IFS=,; echo "$*")]" >"$log" 2>&1 </dev/null &
  pid=$!
  while kill -0 "$pid" 2>/dev/null; do
    sleep 1
    if [ $(((SECONDS - start) % 15)) = 14 ]; then
      echo "   $((SECONDS - start)) s, $(grep -c '^Collecting' "$log" || true) packages found; $(grep -q '^Installing collected' "$log" && echo writing them || echo downloading)"
    fi
  done
  if ! wait "$pid"; then
    tail -n 20 "$log" >&2
    echo "the installation failed: see $log" >&2
    return 1
  fi
  for extra in "$@"; do fingerprint >"$VENV/.installed-$extra"; done
  echo "   installed in $((SECONDS - start)) s"
}
