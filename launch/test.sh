#!/usr/bin/env bash
# Sets up everything on a fresh machine, then lints, type-checks and tests.
#   launch/test.sh            the fast tests
#   launch/test.sh --slow     then the slow ones too, under a deadline of PBS_SLOW_MINUTES (12); says what it did not reach
# Further arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
takes 0 "$@"
slow=no
if [ "${1:-}" = --slow ]; then
  slow=yes
  shift
fi
setup test demo
cd "$ROOT"
# As computing commands set it for themselves (pbs_jax/cli.py says why).
export GLIBC_TUNABLES="${GLIBC_TUNABLES-$("$VENV/bin/python" -c 'from pbs_jax.cli import MALLOC; print(MALLOC)')}"
run() { "$VENV/bin/python" -m "$@" </dev/null; }

say "lint: ruff"
run ruff check .
run ruff format --check .
say "types: mypy"
run mypy
say "fast tests"
run pytest -n "${PBS_TEST_WORKERS:-2}" --dist loadfile --no-loadscope-reorder -m "not slow" "$@"
if [ "$slow" = yes ]; then
  minutes="${PBS_SLOW_MINUTES:-12}"
  say "slow tests: $minutes minutes at most"
  code=0
  PBS_TEST_DEADLINE=$(($(date +%s) + 60 * minutes)) run pytest -m slow "$@" || code=$?
  if [ "$code" = 5 ]; then
    echo "no slow test matches"
  elif [ "$code" != 0 ]; then
    exit "$code"
  fi
fi
