"""Case studies as the paper's Figs. 4 and 6: a picture, its question, several models' answers, words marked.

Green are words of the gold answer. Red are keywords of other questions' golds that are neither in this gold nor in this
question; words that stand in many questions ("nucleus") are never red. Marks are for reading: scores never use them.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from html import escape

import numpy as np

from data_prep import html, stats
from data_prep.schema import QA, QUESTION_TYPES, stable_hash
from pbs_jax.bench import normalize
from pbs_jax.bench.blind import LETTERS
from pbs_jax.bench.evaluate import Settings, cluster_of, track_of
from pbs_jax.bench.metrics import score_answer
from pbs_jax.bench.score import Answers
from pbs_jax.bench.tables import TRACKS, TYPE_NAMES

COMMON = 0.02  # share of question texts that makes a word common
CLOSE = 0.6  # ROUGE-L from which an open answer is shown as close
FAR = 0.3
_STOP = frozenset(
    re.findall(
        r"\w+",
        "a an the of and or in on at to with by for from is are was were it its this that no not as than because which has "
        "have could can may might such these those any often due without",
    )
)
_WORD = re.compile(r"[^\W_]+(?:-[^\W_]+)*|\W+|_+")
_PRIMARY = {"true_false": "right", "multiple_choice": "right", "fill_blank": "partial", "open": "rouge_l"}


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """How one reply was read and scored (robust profile): `kind` right | wrong | invalid | partly, `text` to show."""

    kind: str
    text: str
    reading: str | None


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Keywords of all short golds, without common words: what may be marked red."""

    keywords: frozenset[str]

    @classmethod
    def of(cls, asked: Sequence[QA]) -> Vocabulary:
        texts = {qa.question for qa in asked if qa.question_type != "true_false"}  # statements hold the answers
        counts = Counter(word for text in texts for word in set(normalize.tokens(text)))
        common = {word for word, count in counts.items() if len(texts) > 50 and count > COMMON * len(texts)}
        short = [qa for qa in asked if qa.question_type in ("fill_blank", "multiple_choice")]
        words = {word for qa in short for answer in (qa.answer, *qa.options) for word in normalize.tokens(answer)}
        return cls(frozenset(words - common - _STOP))


def verdict(qa: QA, reply: str) -> Verdict:
    """`qa.options` as shown."""
    found = score_answer("robust", qa.question_type, reply, qa.answer, qa.options)
    value, reading = found.columns[_PRIMARY[qa.question_type]], found.extraction.value
    if reading is None:
        return Verdict("invalid", "can't be read", None)
    if qa.question_type == "open":
        kind = "right" if value >= CLOSE else "wrong" if value < FAR else "partly"
        return Verdict(kind, f"ROUGE-L {value:.2f}", reading)
    if qa.question_type == "fill_blank" and value and not found.columns["exact"]:
        return Verdict("right", "holds the answer", reading)
    return Verdict("right", "right", reading) if value else Verdict("wrong", "wrong", reading)


def marked(qa: QA, reply: str, words: Vocabulary) -> str:
    """The reply as HTML with right and wrong words marked. Closed answers are marked whole, a letter with its option."""
    if qa.question_type in ("true_false", "multiple_choice"):
        found = verdict(qa, reply)
        text = reply.strip() or "nothing"
        if found.reading and found.reading in qa.options and len(text) <= 2:
            text = f"{text}: {found.reading}"
        return escape(text) if found.reading is None else _mark(text, found.kind == "right")
    gold = set(normalize.tokens(qa.answer)) - _STOP
    asked = set(normalize.tokens(qa.question))
    out = []
    for piece in _WORD.findall(reply):
        tokens = normalize.tokens(piece)
        if tokens and all(token in gold for token in tokens):
            out.append(_mark(piece, True))
        elif tokens and all(token in words.keywords and token not in asked | gold for token in tokens):
            out.append(_mark(piece, False))
        else:
            out.append(escape(piece))
    return "".join(out) or "<i>nothing</i>"


def _mark(text: str, right: bool) -> str:
    return f'<mark class="{"right" if right else "wrong"}">{escape(text)}</mark>'


def choose(answers: Answers, names: Sequence[str], per_type: int = 2) -> list[int]:
    """Places of questions where the rows `names` differ most, at most `per_type` of each track and question type.

    Wide spread first, then by hash of the id; each image once, where there are enough. Questions on which several rows
    score alike are left out.
    """
    rows = [row for row in answers.rows if row.name in names]
    order: dict[tuple[str, str], list[tuple[float, int, int]]] = {}
    for k, qa in enumerate(answers.asked):
        replies = [row.replies[0][k] for row in rows]
        if any(reply is None for reply in replies):
            continue
        column = _PRIMARY[qa.question_type]
        scores = [
            score_answer("robust", qa.question_type, str(reply), qa.answer, qa.options).columns[column]
            for reply in replies
        ]
        # The first row right where others fail shows most; a single row shows its best and worst.
        spread = float(np.std(scores)) if len(scores) > 1 else abs(scores[0] - 0.5)
        if spread > 0 or len(rows) == 1:
            order.setdefault((track_of(qa), qa.question_type), []).append((-spread, stable_hash("case", qa.id), k))
    chosen: list[int] = []
    for _, found in sorted(order.items(), key=lambda item: (item[0][0], QUESTION_TYPES.index(item[0][1]))):
        taken = {answers.asked[k].image_id for k in chosen}
        fresh = [k for *_, k in sorted(found) if answers.asked[k].image_id not in taken]
        chosen += (fresh or [k for *_, k in sorted(found)])[:per_type]
    return chosen


def case(
    qa: QA, replies: Mapping[str, str | None], words: Vocabulary, picture: bytes | None, altered: Sequence[str] = ()
) -> str:
    """One case as an HTML article. `altered`: further blocks (the same question without the cell's name)."""
    image = html.image(picture, "cell" if qa.level == "cell" else "patch of the slide", 176) if picture else _NO_IMAGE
    label = f"{TRACKS.get(track_of(qa), track_of(qa))} · {TYPE_NAMES[qa.question_type]} · {qa.task.replace('_', ' ')}"
    return (
        f'<article class="case">{image}<div><p class="kind">{escape(label)}</p>{asked(qa)}'
        f"{answered(qa, replies, words)}{''.join(altered)}</div></article>"
    )


def asked(qa: QA) -> str:
    """Question, options as shown with the gold one marked, or the gold answer."""
    options = "".join(
        f"<li{' class=gold' if option == qa.answer else ''}><b>{LETTERS[k]}</b> {escape(option)}</li>"
        for k, option in enumerate(qa.options)
    )
    gold = f'<ul class="options">{options}</ul>' if options else f'<p class="expected">{escape(qa.answer)}</p>'
    return f'<p class="q">{escape(qa.question)}</p>{gold}'


def answered(qa: QA, replies: Mapping[str, str | None], words: Vocabulary) -> str:
    rows = []
    for name, reply in replies.items():
        if reply is None:
            rows.append(f'<tr><th scope="row">{escape(name)}</th><td>not asked</td><td></td></tr>')
            continue
        found = verdict(qa, reply)
        rows.append(
            f'<tr><th scope="row">{escape(name)}</th><td>{marked(qa, reply, words)}</td>'
            f'<td class="verdict {found.kind}">{escape(found.text)}</td></tr>'
        )
    return f'<table class="answers"><tbody>{"".join(rows)}</tbody></table>'


def studies(
    answers: Answers, names: Sequence[str], picture: Callable[[QA], bytes | None], per_type: int = 2
) -> list[str]:
    """Fig. 4: one article per chosen question with the answers of the rows `names`."""
    words = Vocabulary.of(answers.asked)
    rows = {row.name: row for row in answers.rows if row.name in names}
    return [
        case(
            answers.asked[k],
            {name: rows[name].replies[0][k] for name in names},
            words,
            picture(answers.asked[k]),
        )
        for k in choose(answers, names, per_type)
    ]


def without_names(
    answers: Answers, altered: Answers, picture: Callable[[QA], bytes | None], settings: Settings, most: int = 4
) -> tuple[list[str], list[tuple[str, int, int, stats.Difference]]]:
    """Fig. 6: questions asked with the cell's name and without it.

    Args:
      altered: the same models' answers to the variant (variant.py); rows are matched by name.
    Returns: the articles of at most `most` questions, those first that were right only with the name; and per row
      (name, right with the name, right without, paired difference of the shares by cluster).
    """
    other_rows = {row.name: row for row in altered.rows if row.kind == "model"}
    rows = {row.name: row for row in answers.rows if row.name in other_rows}
    other = {(qa.id, qa.options): k for k, qa in enumerate(altered.asked)}
    pairs = [(k, other[qa.id, qa.options]) for k, qa in enumerate(answers.asked) if (qa.id, qa.options) in other]
    counts, lost = [], Counter[int]()
    for name, row in rows.items():
        both = [(k, v) for k, v in pairs if None not in (row.replies[0][k], other_rows[name].replies[0][v])]
        with_name = [verdict(answers.asked[k], str(row.replies[0][k])).kind == "right" for k, _ in both]
        without = [verdict(altered.asked[v], str(other_rows[name].replies[0][v])).kind == "right" for _, v in both]
        clusters = [cluster_of(answers.asked[k], settings.cluster) for k, _ in both]
        if both:
            gap = stats.paired_difference(with_name, without, clusters, draws=settings.draws, seed=settings.seed)
            counts.append((name, sum(with_name), sum(without), gap))
        lost.update(k for (k, _), a, b in zip(both, with_name, without, strict=True) if a and not b)
    order = sorted(pairs, key=lambda pair: (-lost[pair[0]], stable_hash("case", answers.asked[pair[0]].id)))
    words = Vocabulary.of(answers.asked)
    articles = []
    for k, v in order[:most]:
        qa, plain = answers.asked[k], altered.asked[v]
        block = f'<p class="q again">{escape(plain.question)}</p>' + answered(
            plain, {name: other_rows[name].replies[0][v] for name in rows}, words
        )
        articles.append(case(qa, {name: row.replies[0][k] for name, row in rows.items()}, words, picture(qa), [block]))
    return articles, counts


_NO_IMAGE = '<div class="blank">no image</div>'
