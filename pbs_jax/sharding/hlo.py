"""Reads a compiled program's text: which collectives it runs and what they move, loops multiplied out."""

from __future__ import annotations

import collections
import math
import re

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8}
BYTES |= {"s64": 8, "u64": 8, "f8e4m3fn": 1, "f8e5m2": 1}
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
CALLED = re.compile(
    r"(?:calls|to_apply|condition|body|branch_computations|async_execution_thread)=\{?%?([\w.\-]+(?:, ?%[\w.\-]+)*)"
)
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
CONDITION = re.compile(r"condition=%?([\w.\-]+)")
CONSTANT = re.compile(r"= s32\[\]\S* constant\((\d+)\)")
SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
OPERATION = re.compile(r"= (.*?) ([a-z][a-z\-]*)\(")
CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


def totals(text: str) -> dict[str, dict[str, float]]:
    """{"collectives": kind -> bytes of its results on one chip, "counts": kind -> how often it runs,
    "cycles": {"estimated": the TPU compiler's own estimate of its fusions, 0 where it gives none}} of one execution."""
    computations, entry = _computations(text)
    moved: collections.defaultdict[str, float] = collections.defaultdict(float)
    counts: collections.defaultdict[str, float] = collections.defaultdict(float)
    cycles = 0.0
    for name, times in _executions(computations, entry).items():
        for line in computations[name]:
            found = OPERATION.search(line)
            if not found:
                continue
            kind = found[2].removesuffix("-start")
            if kind in COLLECTIVES:
                shapes = [_bytes(*shape) for shape in SHAPE.findall(found[1])]
                # An asynchronous start names its operand beside its result: the result is the larger or the last.
                moved[kind] += times * (max(shapes, default=0) if found[2].endswith("-start") else sum(shapes))
                counts[kind] += times
            estimate = CYCLES.search(line)
            if estimate:
                cycles += times * int(estimate[1])
    return {"collectives": dict(moved), "counts": dict(counts), "cycles": {"estimated": cycles}}


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    found: dict[str, list[str]] = {}
    name = entry = ""
    for line in text.splitlines():
        start = COMPUTATION.match(line)
        if start:
            name = start[2]
            found[name] = []
            entry = name if start[1] else entry
        elif line.startswith("}"):
            name = ""
        elif name:
            found[name].append(line)
    return found, entry


def _executions(computations: dict[str, list[str]], entry: str) -> dict[str, float]:
    """How often each computation runs, fusions' insides left out (their cost stands on the fusion)."""
    times: dict[str, float] = {}

    def visit(name: str, factor: float) -> None:
        times[name] = times.get(name, 0.0) + factor
        for line in computations[name]:
            if " fusion(" in line:
                continue
            inside = factor * (_trips(line, computations) if " while(" in line else 1)
            for group in CALLED.findall(line):
                for called in re.split(r", ?", group):
                    if called.lstrip("%") in computations:
                        visit(called.lstrip("%"), inside)

    visit(entry, 1.0)
    return times


def _trips(line: str, computations: dict[str, list[str]]) -> int:
    """How often a loop turns: as annotated, or (the TPU compiler drops that) the bound that its condition compares with."""
    known, condition = TRIPS.search(line), CONDITION.search(line)
    if known or not condition:
        return int(known[1]) if known else 1
    lines = list(computations.get(condition[1], ()))
    lines += [inner for line in lines for name in CALLED.findall(line) for inner in computations.get(name, ())]
    return max((int(found[1]) for text in lines if (found := CONSTANT.search(text))), default=1)


def _bytes(dtype: str, sizes: str) -> int:
    return BYTES.get(dtype, 0) * math.prod(int(size) for size in sizes.split(",") if size)
