"""Report pages: escaping, structure, images, and charts whose marks lie where their numbers say."""

from __future__ import annotations

import io
import itertools
import math
import re
from html.parser import HTMLParser

import pytest
from PIL import Image

from data_prep import charts, html

VOID = {"meta", "img", "br"}


class Balanced(HTMLParser):
    """Fails on a tag that is not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def png() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (4, 4), (200, 100, 150)).save(out, "PNG")
    return out.getvalue()


def page() -> str:
    examples = [
        {"image": png(), "question": "Which?", "gold": "a", "answer": "", "correct": False, "options": ("a", "b")},
        {"image": None, "question": "<script>x</script>", "gold": "a", "answer": "a", "correct": True},
    ]
    sections = [
        html.Section(
            "Result & more", html.cards([(0.5, "accuracy", "n 3")]) + html.table([["x<y", 1.0]], ["name", "v"])
        ),
        html.Section("Cells", html.image_grid([(png(), "Neutrophil")]), "Some."),
        html.Section("Examples", html.qa_examples(examples)),
        html.Section("Curves", html.columns([charts.line_chart({"loss": [(0, 2.0), (10, 1.0)]}, "phase 1")])),
    ]
    return html.render_page("A <b> title", sections, subtitle="s", warnings=["watch out"], footer="f")


def test_page_is_whole_escaped_and_self_contained() -> None:
    text = page()
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    assert "script" not in parser.seen and "b" in parser.seen  # <b> of the cards, none of the title
    assert "A &lt;b&gt; title" in text and "&lt;script&gt;" in text and "x&lt;y" in text
    assert not re.search(r"""(?:src|href)=["'](?!data:|#)""", text), "everything is inside the page"
    assert text.index("watch out") < text.index("<h2>Result &amp; more"), "warnings come first"
    assert html.RESEARCH_NOTICE in text


def test_number_formats() -> None:
    shown = [html.number(v) for v in (0.91449, 1512, 1512.0, float("nan"), None, True, "a<b", 123.45, 3)]
    assert shown == ["0.914", "1,512", "1,512", "–", "–", "True", "a&lt;b", "123.5", "3"]


def test_columns_of_numbers_align_right() -> None:
    text = html.table([["a", 1.0, None], ["b", None, "x"]], ["name", "value", "note"])
    assert re.findall(r"<th([^>]*)>", text) == ["ead", "", ' class="n"', ""]


def test_image_of_unknown_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="JPEG, PNG or WebP"):
        html.image_grid([(b"not an image", "x")])


def test_line_chart_maps_values_to_places() -> None:
    text = charts.line_chart({"loss": [(0, 0.0), (50, 5.0), (100, 10.0), (110, math.nan)]}, "t")
    points = [tuple(map(float, pair.split(","))) for pair in re.search(r'points="([^"]+)"', text)[1].split()]  # type: ignore[index]
    assert len(points) == 3
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x0 == charts.LEFT and x2 == charts.WIDTH - charts.RIGHT and x1 == pytest.approx((x0 + x2) / 2)
    assert y2 == charts.TOP and y0 == charts.HEIGHT - charts.BOTTOM and y1 == pytest.approx((y0 + y2) / 2)


def test_long_curves_are_binned_by_means() -> None:
    points = [(float(k), float(k % 2)) for k in range(4000)]
    short = charts.binned(points)
    assert len(short) == charts.MAX_POINTS
    assert all(y == 0.5 for _, y in short)


def test_bars_carry_value_interval_and_reference() -> None:
    text = charts.interval_bars([charts.Bar("model", 0.5, 0.25, 0.75, True)], "t", reference=(0.25, "chance"))
    left, width = (float(v) for v in re.search(r'<rect x="([\d.]+)"[^>]* width="([\d.]+)"', text).groups())  # type: ignore[union-attr]
    low, high = (float(v) for v in re.search(r'd="M([\d.]+) [^H]+H([\d.]+)', text).groups())  # type: ignore[union-attr]
    assert low == pytest.approx(left + width / 2, abs=0.2) and high == pytest.approx(left + width * 1.5, abs=0.2)
    assert "chance 0.25" in text and "0.500" in text


@pytest.mark.parametrize("x_max", [0.1, 0.35, 0.611, 0.818, 1.0, 7.3, 100.0])
def test_ticks_of_bars_stand_at_their_values_and_not_beyond_the_axis(x_max: float) -> None:
    text = charts.interval_bars([charts.Bar("all of it", x_max)], "t", x_max=x_max)
    left, width = (float(v) for v in re.search(r'<rect x="([\d.]+)"[^>]* width="([\d.]+)"', text).groups())  # type: ignore[union-attr]
    found = [
        (float(x), float(name)) for x, name in re.findall(r'<text x="([\d.]+)"[^>]*"middle">([\d.]+)</text>', text)
    ]
    assert len(found) >= 3 and found[-1][1] <= x_max
    assert all(x == pytest.approx(left + value / x_max * width, abs=0.2) for x, value in found)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.013, 0.017), (-3, 1e6), (5, 5), (0, 0)])
def test_ticks_are_round_and_span(low: float, high: float) -> None:
    found = charts.ticks(low, high)
    assert found[0] <= low and found[-1] >= high and 2 <= len(found) <= 9
    steps = {round(b - a, 9) for a, b in itertools.pairwise(found)}
    assert len(steps) == 1
