"""Every question with all models' answers side by side, filtered in the page: data as JSON, one inline script, no network.

Without scripts the page's tables and case studies stay; only this list is empty, and says so.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from data_prep.html import data_uri
from data_prep.schema import QA, stable_hash
from pbs_jax.bench import slices
from pbs_jax.bench.cases import verdict
from pbs_jax.bench.evaluate import track_of
from pbs_jax.bench.score import Answers
from pbs_jax.bench.tables import TRACKS, TYPE_NAMES

HERE = Path(__file__)
SIDE, QUALITY = 112, 80  # of the embedded thumbnails
MOST = 3000  # questions in a page: about 1 MB a model


def browser(
    answers: Answers,
    names: Sequence[str],
    picture: Callable[[QA], bytes | None],
    *,
    most: int = MOST,
    most_images: int = 600,
) -> str:
    """HTML of the list: rows `names` side by side, at most `most` questions (by hash, whole images first come).

    `picture(qa)` gives the encoded picture of a question; of at most `most_images` images a thumbnail is embedded.
    """
    ranked = sorted(range(len(answers.asked)), key=lambda k: stable_hash("page", answers.asked[k].image_id))
    kept = sorted(ranked[:most], key=lambda k: (track_of(answers.asked[k]), answers.asked[k].image_id))
    rows = [row for name in names for row in answers.rows if row.name == name]
    origins = slices.sources(answers.asked)
    images: dict[str, str] = {}
    items = []
    for k in kept:
        qa = answers.asked[k]
        if qa.image_id not in images and len(images) < most_images and (found := picture(qa)):
            images[qa.image_id] = data_uri(thumbnail(found))
        replies = [(row.replies[0][k]) for row in rows]
        items.append(
            {
                "id": qa.id,
                "track": TRACKS.get(track_of(qa), track_of(qa)),
                "type": TYPE_NAMES[qa.question_type],
                "task": qa.task.replace("_", " "),
                "source": origins[k],
                "question": qa.question,
                "options": list(qa.options),
                "gold": qa.answer,
                "image": qa.image_id,
                "answers": [None if reply is None else _answer(qa, reply) for reply in replies],
            }
        )
    content = {"rows": list(names), "items": items, "images": images, "total": len(answers.asked)}
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return (
        '<noscript><p class="notice warning">The list needs scripts; tables and case studies do not.</p></noscript>'
        '<div id="filters"></div><p id="count" class="lead" aria-live="polite"></p><div id="items"></div>'
        '<button id="more" type="button">Show more</button>'
        f'<script type="application/json" id="answers">{text}</script>'
        f"<script>{HERE.with_name('browser.js').read_text()}</script>"
    )


def _answer(qa: QA, reply: str) -> list[Any]:
    """[reply, kind, text of the verdict, how it was read where that is more than the reply]."""
    found = verdict(qa, reply)
    reading = found.reading if found.reading and found.reading.strip() != reply.strip() else ""
    return [reply, found.kind, found.text, reading if qa.options or qa.question_type == "true_false" else ""]


def thumbnail(data: bytes) -> bytes:
    """JPEG of at most SIDE pixels for an encoded picture."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as found:
        found.draft("RGB", (SIDE, SIDE))
        small = found.convert("RGB")
        small.thumbnail((SIDE, SIDE))
        out = io.BytesIO()
        small.save(out, "JPEG", quality=QUALITY)
    return out.getvalue()
