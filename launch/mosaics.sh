#!/usr/bin/env bash
# The README's results on slides: mosaics of real cells, phases 2 and 4 for seeds that launch/pbc.sh has trained.
#   launch/mosaics.sh ROOT OUT [SEED ...]        (OUT as given to launch/pbc.sh; default seeds 0 1 2)
# Every command resumes or reuses what is finished, so the script can be stopped and run again.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
takes 2 "$@"
pbs=$(find_pbs)
root=$1 out=$2
shift 2
seeds=("$@")
[ $# -gt 0 ] || seeds=(0 1 2)

mosaics=$out/mosaics slides=$out/slides background=$out/background
slide_job=(data run --source slides --root "$mosaics" --workers 2 --backbone "$out/seed${seeds[0]}/phase0_backbone")

"$pbs" data mosaic --cells "$root" --out "$mosaics"
"$pbs" "${slide_job[@]}" --table "$mosaics/slides.csv" --out "$slides"
"$pbs" data qa "$slides" --tokenizer "$out/pbc/tokenizer" --truth "$mosaics"
# The same fields before white cells were laid in: what can be answered from everything else.
"$pbs" "${slide_job[@]}" --table "$mosaics/background.csv" --out "$background" || [ $? -eq 3 ]

rows=()
for seed in "${seeds[@]}"; do
  run=$out/seed$seed
  backbone=(--backbone "$run/phase0_backbone")
  for kind in cell patch; do "$pbs" data features --root "$slides" --kind $kind "${backbone[@]}" --out "$run/slides"; done
  "$pbs" train --config=phase2_cell_patch_alignment --config.seed="$seed" --config.data.root="$slides" \
    --config.data.features="$run/slides" --config.init_from.backbone="$run/phase0_backbone" \
    --config.init_from.qformer="$run/phase1_cell_representation" --workdir="$run/phase2_cell_patch_alignment"
  # The language model also learns to read a slide's caption in the slot.
  "$pbs" train --config=phase0_language_model --config.seed="$seed" --config.data.root="$out/pbc" --config.data.slides="$slides" \
    --config.init_from.language_model="$run/phase0_language_model" --workdir="$run/phase0_language_model_slides"
  for tokens in slide backbone; do # phase 2's tokens, and the raw backbone's as the row to beat
    features=$run/slides reads=(--kind "$tokens") name=nano
    if [ $tokens = backbone ]; then
      features=$run/slides_backbone name="nano, raw backbone"
    else
      reads+=(--alignment "$run/phase2_cell_patch_alignment")
    fi
    "$pbs" data features --root "$slides" "${reads[@]}" "${backbone[@]}" --out "$features"
    "$pbs" train --config=phase4_slide_qa --config.seed="$seed" --config.data.root="$slides" --config.data.features="$features" \
      --config.init_from.language_model="$run/phase0_language_model_slides" \
      --config.init_from.projector="$run/phase3_cell_qa" --workdir="$run/phase4_$tokens"
    "$pbs" bench run --model "pbs:$run/phase4_$tokens" --name "$name" --data "$slides" --features "$features" \
      --out "$run/bench/slides_$tokens"
  done
  ask=(bench run --model "pbs:$run/phase4_slide" --data "$slides")
  "$pbs" "${ask[@]}" --name nano --modality blind --features "$run/slides" --out "$run/bench/slides_blind"
  "$pbs" data features --root "$background" --kind slide --alignment "$run/phase2_cell_patch_alignment" "${backbone[@]}" \
    --out "$run/background"
  "$pbs" "${ask[@]}" --name "nano, background" --features "$run/background" --out "$run/bench/slides_background"
  for patches in 3 6; do # of nine, as the paper's Table 5
    "$pbs" "${ask[@]}" --name nano --patches $patches --features "$run/slides" --out "$run/bench/slides_patches$patches"
  done
  for row in slide blind background backbone patches3 patches6; do rows+=("$run/bench/slides_$row"); done
done
"$pbs" bench report "${rows[@]}" --data "$slides" --split test --train "$slides" --out "$out/report_slides" \
  --title "Mosaics of real cells, held-out slides"
