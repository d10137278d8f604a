#!/usr/bin/env bash
# The README's results on real cells: ROOT is the folder with cells/pbc_barcelona, annotations/wbcatt and fields/bccd.
#   launch/pbc.sh ROOT OUT [SEED ...]        (default seeds 0 1 2; about half an hour each on two idle cores)
# Every command resumes or reuses what is finished, so the script can be stopped and run again.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
takes 2 "$@"
pbs=$(find_pbs)
root=$1 out=$2
shift 2
seeds=("$@")
[ $# -gt 0 ] || seeds=(0 1 2)

# A few pictures are rejected with their reasons (exit code 3); that is no failure.
rejects_are_fine() { "$@" || [ $? -eq 3 ]; }

rejects_are_fine "$pbs" data run --source pbc --root "$root" --out "$out/pbc" --workers 2
rejects_are_fine "$pbs" data run --source bccd --root "$root" --out "$out/bccd" --tokenizer "$out/pbc/tokenizer" --workers 2

reports=() ood=()
for seed in "${seeds[@]}"; do
  run=$out/seed$seed
  common=(--config.data.root="$out/pbc" --config.seed="$seed") features=--config.data.features="$run"
  "$pbs" train --config=phase0_backbone "${common[@]}" --workdir="$run/phase0_backbone"
  "$pbs" data features --root "$out/pbc" --backbone "$run/phase0_backbone" --out "$run"
  # Drills first: short slots with drawn facts, then the same again with more statements, then whole captions.
  drill=(train --config=phase0_language_model_drill "${common[@]}")
  "$pbs" "${drill[@]}" --workdir="$run/drill1"
  "$pbs" "${drill[@]}" --workdir="$run/drill2" --config.init_from.language_model="$run/drill1" --config.seed=$((seed + 1)) \
    --config.steps=400 --config.drill.kinds.true_false=0.7
  "$pbs" train --config=phase0_language_model "${common[@]}" --config.init_from.language_model="$run/drill2" \
    --workdir="$run/phase0_language_model"
  "$pbs" train --config=phase1_cell_representation "${common[@]}" "$features" --workdir="$run/phase1_cell_representation"
  "$pbs" train --config=phase3_cell_qa "${common[@]}" "$features" --workdir="$run/phase3_cell_qa" \
    --config.init_from.backbone="$run/phase0_backbone" \
    --config.init_from.language_model="$run/phase0_language_model" \
    --config.init_from.qformer="$run/phase1_cell_representation"
  ask=(bench run --model "pbs:$run/phase3_cell_qa" --name nano)
  "$pbs" "${ask[@]}" --data "$out/pbc" --out "$run/bench/image"
  "$pbs" "${ask[@]}" --data "$out/pbc" --out "$run/bench/blind" --modality blind
  "$pbs" "${ask[@]}" --data "$out/bccd" --out "$run/bench/bccd"
  reports+=("$run/bench/image" "$run/bench/blind")
  ood+=("$run/bench/bccd")
done
"$pbs" bench report "${reports[@]}" --data "$out/pbc" --split test --train "$out/pbc" --out "$out/report" --title "PBC, held-out cells"
"$pbs" bench report "${ood[@]}" --data "$out/bccd" --train "$out/pbc" --out "$out/report_bccd" --title "BCCD, another laboratory"
