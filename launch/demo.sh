#!/usr/bin/env bash
# Sets up everything on a fresh machine, then runs the offline demo on CPU.
#   launch/demo.sh [--out DIR ...]        (arguments go to `pbs demo`, whose own --help lists them)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
takes 0 "$@"
setup demo
say "demo"
exec "$VENV/bin/pbs" demo "$@"
