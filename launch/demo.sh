#!/usr/bin/env bash
# Sets up everything on a fresh machine, then runs the offline demo on CPU. Arguments go to `pbs demo` (see --help).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup demo
say "demo"
exec "$VENV/bin/pbs" demo "$@"
