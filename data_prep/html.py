"""One self-contained HTML page for every report: no network, no scripts, light and dark, printable.

Helpers return HTML strings and escape all text they are given; `render_page` puts sections together. Charts are in
`data_prep.charts`.
"""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

RESEARCH_NOTICE = "For research and education only. Not a diagnostic device; no clinical claim is made."
STYLE = (Path(__file__).parent / "report.css").read_text()


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """A headed part of a page. `body` is HTML; `lead` is one plain sentence under the heading."""

    title: str
    body: str
    lead: str = ""


def render_page(
    title: str, sections: Sequence[Section], *, subtitle: str = "", warnings: Iterable[str] = (), footer: str = ""
) -> str:
    """A whole page. `warnings` come first, where nobody misses them; the research notice is always at the end."""
    marks = [f"s{k}" for k in range(1, len(sections) + 1)]
    links = "".join(f'<a href="#{m}">{escape(s.title)}</a>' for m, s in zip(marks, sections, strict=True))
    parts = [
        f'<section id="{mark}"><h2>{escape(section.title)}</h2>'
        + (f'<p class="lead">{escape(section.lead)}</p>' if section.lead else "")
        + f"{section.body}</section>"
        for mark, section in zip(marks, sections, strict=True)
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<header><h1>{escape(title)}</h1>"
        + (f'<p class="subtitle">{escape(subtitle)}</p>' if subtitle else "")
        + (f"<nav>{links}</nav>" if len(sections) > 2 else "")
        + f"</header><main>{''.join(notice(text, 'warning') for text in warnings)}{''.join(parts)}</main>"
        f"<footer>{f'<p>{escape(footer)}</p>' if footer else ''}<p>{RESEARCH_NOTICE}</p></footer></body></html>\n"
    )


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def notice(text: str, kind: str = "info") -> str:
    """A boxed remark. kind: info | warning | good."""
    return f'<p class="notice {escape(kind)}" role="note">{escape(text)}</p>'


def cards(items: Iterable[tuple[Any, str, str]]) -> str:
    """Headline figures: (value, label, small print)."""
    return '<div class="cards">{}</div>'.format(
        "".join(
            f'<div class="card"><b>{number(value)}</b><span>{escape(label)}</span><small>{escape(note)}</small></div>'
            for value, label, note in items
        )
    )


def table(
    rows: Iterable[Sequence[Any]], header: Sequence[str], caption: str = "", *, strong: Iterable[int] = ()
) -> str:
    """A table whose columns of numbers align right. `strong`: indices of rows to set apart (the measured system)."""
    lines = [list(row) for row in rows]
    wanted = set(strong)
    right = [
        any(_is_number(line[k]) for line in lines)
        and all(_is_number(line[k]) or line[k] in (None, "") for line in lines)
        for k in range(len(header))
    ]
    align = [' class="n"' if flag else "" for flag in right]
    head = "".join(f"<th{a}>{escape(str(name))}</th>" for a, name in zip(align, header, strict=True))
    body = "".join(
        f"<tr{' class="strong"' if k in wanted else ''}>"
        + "".join(f"<td{a}>{number(value)}</td>" for a, value in zip(align, line, strict=True))
        + "</tr>"
        for k, line in enumerate(lines)
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f'<div class="scroll"><table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def image_grid(items: Iterable[tuple[bytes, str]], side: int = 96) -> str:
    """Encoded JPEG, PNG or WebP images with captions, `side` CSS pixels wide."""
    figures = "".join(
        f'<figure style="width:{side}px">{image(data, text, side)}<figcaption>{escape(text)}</figcaption></figure>'
        for data, text in items
    )
    return f'<div class="grid">{figures}</div>'


def image(data: bytes, alt: str, side: int, height: int | None = None) -> str:
    """One embedded image, `side` CSS pixels wide and, unless `height` is given, high. Raises ValueError for bytes that
    are no JPEG, PNG or WebP."""
    return f'<img src="{data_uri(data)}" alt="{escape(alt)}" width="{side}" height="{height or side}" loading="lazy">'


def columns(parts: Iterable[str], across: int = 0) -> str:
    """Blocks side by side where the window is wide enough; with `across`, so many in a row of any window."""
    style = f' style="grid-template-columns:repeat({across},minmax(0,1fr))"' if across else ""
    return f'<div class="columns"{style}>{"".join(f"<div>{part}</div>" for part in parts)}</div>'


def qa_examples(examples: Iterable[Mapping[str, Any]]) -> str:
    """Questions with their image: mappings of image (bytes or None), question, gold, answer, correct, maybe options."""
    return f'<div class="examples">{"".join(_qa_example(example) for example in examples)}</div>'


def _qa_example(example: Mapping[str, Any]) -> str:
    picture = image(example["image"], "cell", 112) if example.get("image") else '<div class="blank">no image</div>'
    options = "".join(f"<li>{escape(str(option))}</li>" for option in example.get("options") or ())
    mark = '<span class="yes">✓ right</span>' if example["correct"] else '<span class="no">✗ wrong</span>'
    return (
        f'<article>{picture}<div><p class="q">{escape(str(example["question"]))}</p>'
        + (f'<ol class="options" type="A">{options}</ol>' if options else "")
        + f"<dl><dt>expected</dt><dd>{escape(str(example['gold']))}</dd>"
        f"<dt>answered</dt><dd>{escape(str(example['answer'])) or '<i>nothing</i>'} {mark}</dd></dl></div></article>"
    )


def number(value: Any) -> str:
    """Text of a table cell: 3 decimals for floats below 100, thousands separated, a dash for None and NaN."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool) or not _is_number(value):
        return escape(str(value))
    if float(value).is_integer() and not isinstance(value, float):
        return f"{int(value):,}"
    size = abs(float(value))
    return f"{value:,.0f}" if size >= 1000 else f"{value:.1f}" if size >= 100 else f"{value:.3f}"


def _is_number(value: Any) -> bool:
    return hasattr(value, "__float__") and not isinstance(value, str | bool)


def data_uri(data: bytes) -> str:
    """Encoded image as a data URL. Raises ValueError for bytes that are no JPEG, PNG or WebP."""
    for magic, kind in ((b"\xff\xd8", "jpeg"), (b"\x89PNG", "png"), (b"RIFF", "webp")):
        if data.startswith(magic):
            return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    raise ValueError(f"an image must be JPEG, PNG or WebP; these bytes begin with {data[:8]!r}")
