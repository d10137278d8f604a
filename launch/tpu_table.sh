#!/usr/bin/env bash
# The README's table of TPU slices: every phase at 7B, decoding and backbone features, compiled for five slices.
#   launch/tpu_table.sh OUT        (needs the extra aot; up to four minutes a cell on one core, about two hours)
# A cell that OUT holds already is not compiled again.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
takes 1 "$@"
pbs=$(find_pbs)
out=$1
mkdir -p "$out"

# cell NAME CONFIG TOPOLOGY [options]: one line of JSON; a slice that is too small is an answer too (exit code 1).
cell() {
  local name=$1 config=$2 topology=$3
  shift 3
  [ -s "$out/$name.jsonl" ] && return
  rm -f "$out/$name.part"
  "$pbs" compile --config="$config:size=7b" --topology="$topology" --json "$out/$name.part" "$@" || [ -s "$out/$name.part" ]
  mv "$out/$name.part" "$out/$name.jsonl"
}

for topology in v5e:1x1 v5e:2x4 v5e:4x4 v6e:2x4 v5p:2x2x1; do
  # One 16 GB chip holds the language model as int8 only, and one row (its questions about three images) at a time.
  one=()
  [ $topology = v5e:1x1 ] && one=(--config.int8=true --config.batch_size=1)
  # Where people will train first: twice the paper's batch.
  twice=()
  [ $topology = v5e:2x4 ] && twice=(--config.batch_size=64)
  cell "1_$topology" phase1_cell_representation $topology "${twice[@]}"
  cell "2_$topology" phase2_cell_patch_alignment $topology "${twice[@]}"
  cell "3_$topology" phase3_cell_qa $topology --remat "${one[@]}"
  cell "4_$topology" phase4_slide_qa $topology --remat "${one[@]}"
  cell "features_$topology" phase1_cell_representation $topology --step features
done
cell decode_v5e:2x4 phase3_cell_qa v5e:2x4 --step decode
cell decode_v5e:1x1 phase3_cell_qa v5e:1x1 --step decode --config.int8=true --config.batch_size=8
cat "$out"/*.jsonl > "$out/all"
"$pbs" compile --table "$out/all"
