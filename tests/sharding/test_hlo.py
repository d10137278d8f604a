"""Collectives of a compiled program are counted through its loops."""

from __future__ import annotations

from pbs_jax.sharding.hlo import totals

PROGRAM = """HloModule jit_f, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

%body (carry: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %gathered = bf16[32,16]{1,0:T(8,128)(2,1)} all-gather(%w), dimensions={0}
  %start = (bf16[4,4], bf16[16,4]) all-gather-start(%v), dimensions={0}
  %done = bf16[16,4] all-gather-done(%start)
}

%test (carry: (s32[], bf16[8,16])) -> pred[] {
  %n = s32[]{:T(128)} constant(28)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (p: bf16[8,16]) -> bf16[8,16] {
  %loop = (s32[], bf16[8,16]) while(%start), condition=%test, body=%body
  ROOT %summed = f32[10]{0} all-reduce(%x), to_apply=%add
}
"""


def test_a_loop_counts_its_trips_and_a_start_its_result():
    found = totals(PROGRAM)
    assert found["counts"] == {"all-gather": 56.0, "all-reduce": 1.0}
    assert found["collectives"] == {"all-gather": 28 * (2 * 32 * 16 + 2 * 16 * 4), "all-reduce": 40.0}
