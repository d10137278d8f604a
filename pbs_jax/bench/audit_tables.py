"""The audit for reading: gold balance, shortcuts, leakage, validity, contract, duplicates, release against paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from data_prep.schema import QUESTION_TYPES
from pbs_jax.bench import validity
from pbs_jax.bench.audit import share
from pbs_jax.bench.tables import TYPE_NAMES, Table


def to_tables(found: Mapping[str, Any]) -> list[Table]:
    """The audit for reading: gold balance, text-only scores, leakage, validity."""
    groups = found["groups"]
    header = (
        "",
        "questions",
        "images",
        "T/F true",
        'always "True"',
        "MCQ first option",
        'always "A"',
        "answer positions",
    )
    balance = [
        (
            _name(group),
            str(group["questions"]),
            str(group["images"]),
            _of(group["true"], group["by_type"]["true_false"]),
            _percent(share(group["true"], group["by_type"]["true_false"])),
            _of(sum(group["answer_positions"][:1]), group["by_type"]["multiple_choice"]),
            _percent(share(sum(group["answer_positions"][:1]), group["by_type"]["multiple_choice"])),
            ", ".join(map(str, group["answer_positions"])) or "-",
        )
        for group in groups
    ]
    shortcut_header = (
        "", "MCQ chance", "longest option", "first of the longest", "text-only T/F bal. acc", "text-only MCQ",
        "text-only FB EMatch", "largest T/F imbalance", "recurring texts", "repeats",
    )  # fmt: skip
    shortcuts = [
        (
            _name(group),
            *(_percent(group[key]) for key in ("chance", "longest_option", "first_longest_option")),
            *(_percent((group["text_only"] or {}).get(name)) for name in QUESTION_TYPES[:3]),
            _percent(group["largest_statement_imbalance"]),
            str(group["questions_whose_text_recurs"]),
            str(group["repeated_ids"] + group["repeated_questions_of_an_image"]),
        )
        for group in groups
    ]
    tables = [
        Table("Gold balance: what a constant answer scores", header, tuple(balance), _paper_notes(found)),
        Table(
            "Shortcuts in the text",
            shortcut_header,
            tuple(shortcuts),
            ("text-only: the answer of the nearest training (else validation) question by TF-IDF.",),
        ),
    ]
    if found["leakage"]:
        rows = [
            (f"{x['first']} in {x['second']}", *(_of(*x[name]) for name in ("images", "slides", "texts")))
            for x in found["leakage"]
        ]
        tables.append(Table("Leakage between splits", ("", "images", "slides/patients", "question texts"), tuple(rows)))
    if found["validity"]:
        rows = [
            (x["group"], x["check"], _of(x["found"], x["of"]), "" if x["valid"] else f"{validity.INVALID}: {x['why']}")
            for x in found["validity"]
        ]  # fmt: skip
        tables.append(Table("Task validity", ("", "check", "count", "verdict"), tuple(rows)))
    return [*tables, *_release_tables(found)]


def _release_tables(found: Mapping[str, Any]) -> list[Table]:
    """Contract, duplicates, and, for released files, the paper's counts and standard deviations."""
    rules = [(x["rule"], _of(x["broken"], x["of"]), _some(x["ids"])) for x in found["contract"]]
    out = [Table("Contract of ids, paths and texts", ("rule", "broken", "questions"), tuple(rules))]
    twice = [
        (f"{x['group']}: {x['what']}", str(x["found"]), _some([" = ".join(ids) for ids in x["ids"]]))
        for x in found["duplicates"]
        if x["found"]
    ]
    if twice:
        out.append(Table("Duplicates", ("", "found", "ids"), tuple(twice)))
    if any(file["as_pinned"] is not None for file in found["files"]):
        counted = [
            (f"{x['group']}: {x['task']}", *(f"{x['here'][kind]:,} / {x['paper'][kind]:,}" for kind in QUESTION_TYPES))
            for x in found["paper"]["counts"]
        ]
        header = ("", *(TYPE_NAMES[kind] for kind in QUESTION_TYPES))
        out.append(Table("Release / paper (Table 4), questions", header, tuple(counted)))
        note = (
            "1 means that the paper's sd is by question, clusters ignored; entries whose standard error is above .004."
        )
        checked = [(x["name"], str(x["entries"]), f"{x['ratio']:.3f}", f"{x['sd']:.3f}") for x in found["paper"]["std"]]
        title = "The paper's standard deviations over sqrt(p(1-p)/n)"
        out.append(Table(title, ("", "entries", "mean ratio", "sd of ratios"), tuple(checked), (note,)))
    return out


def _some(ids: Sequence[str], most: int = 3) -> str:
    more = f" and {len(ids) - most:,} more (audit.json)" if len(ids) > most else ""
    return ", ".join(ids[:most]) + more or "-"


def _paper_notes(found: Mapping[str, Any]) -> tuple[str, ...]:
    files = tuple(
        f"{file['name']}: {'as pinned' if file['as_pinned'] else 'NOT as released'}, sha256 {file['sha256'][:12]}"
        for file in found["files"]
        if file["as_pinned"] is not None
    )
    if found["missing"]:
        files += (f"released files not at hand: {', '.join(found['missing'])}",)
    return files + tuple(
        f"{_name(group)}: paper's Table 4 has "
        + ", ".join(f"{kind} {count}" for kind, count in group["by_type_in_paper"].items())
        + "; these files "
        + ", ".join(f"{kind} {count}" for kind, count in group["by_type"].items())
        for group in found["groups"]
        if found["files"] and group["by_type_in_paper"] and group["by_type_in_paper"] != group["by_type"]
    )


def _name(group: Mapping[str, Any]) -> str:
    return f"{group['level']}/{group['domain']}/{group['split']}"


def _of(found: int, total: int) -> str:
    return f"{found:,} of {total:,}" if total else "-"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
