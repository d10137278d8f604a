"""Quality control of questions (paper 9.4): one rule, one function; every rejected question keeps its reason.

A rule looks at one question and what is recorded about its image, and returns what is wrong with it or None. The last
three need the whole set. Rules read words, so they miss what only an expert sees: the review sheet is for that.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rapidfuzz import fuzz, process

from data_prep import near_duplicates, qa_bank
from data_prep.claims import Facts, contradiction
from data_prep.schema import ARTIFACT, OTHERS, QA, released_record
from data_prep.trivial import trivial

VERSION = "1"  # of the rules and their word lists; goes into what they made
MAX_BLANK_WORDS, MAX_OPEN_WORDS, MAX_SENTENCES = 10, 60, 2  # fill-in answers have fewer than ten words (paper 3.2.2)
CHOICES = (3, 5)
LONGEST, LONGER_BY = 1.6, 12  # a right option that is so many times, and characters, longer gives itself away
NO_FACTS = Facts()

_SMEAR_TERMS = re.findall(
    r"\w+",
    "cell nucleus nuclear nuclei nucleoli cytoplasm cytoplasmic chromatin granule granules granular granularity "
    "granulation agranular smear slide leukocyte neutrophil lymphocyte monocyte eosinophil basophil granulocyte "
    "erythrocyte platelet thrombocyte blast megakaryocyte vacuole vacuoles vacuolation lobe lobes lobed lobulation "
    "segmentation segmented hypersegmented hyposegmented stain staining preparation artifact artefact debris membrane "
    "auer inclusion dysplasia dysplastic differential morphology morphological cytological erythroid myeloid "
    "anisocytosis poikilocytosis",
)
_OFF_TOPIC = re.compile(
    r"\b(?:biops\w+|tissue architecture|glands?|glandular|epitheli\w+|stroma\w*|tumou?r margins?|immunohistochem\w+|"
    r"histolog\w+|x-?rays?|MRI|CT scan|radiolog\w+|ultrasound|coagulation factors?|clotting factors?|prothrombin|"
    r"blood (?:type|group)s?|transfusions?|lymph nodes?|spleen|life ?span|half-life|blood pressure|insurance|"
    r"(?:where|which organ)\b.*\bproduced)\b",
    re.IGNORECASE,
)
_HIDDEN = re.compile(
    r"\b(?:histor(?:y|ies)|treat(?:ed|ment|ments)|therap\w+|medicat\w+|drugs?|dose|symptoms?|fever|"
    r"(?:patient|donor|person)\b[^?]*\b(?:age|sex|gender|old)|(?:age|sex|gender)\b[^?]*\b(?:patient|donor|person)|"
    r"years? old|h[a]?emoglobin (?:level|value|concentration)|lab(?:oratory)? (?:values?|results?|tests?|findings)|"
    r"(?:platelet|blood|leukocyte|white cell) counts?|serum|ferritin|karyotyp\w+|cytogenetic\w*|"
    r"immunophenotyp\w*|flow cytometry|CD\d+|prognosis|survival|follow-?up|family)\b|"
    r"\b(?:what|which|name)(?: \w+){0,2} (?:mutations?|genes?)\b",
    re.IGNORECASE,
)
_OF_A_SLIDE = re.compile(
    r"\bdifferential count\b|\bmost (?:abundant|frequent) cell\b|\bpercentage of\b|\bother cells (?:in|on) the (?:smear|slide)\b",
    re.IGNORECASE,
)
_DIAGNOSIS = re.compile(
    r"\b(?:MDS|AML|APL|CML|CLL|MPN|myelodysplas\w*|myeloproliferat\w*|leuka?emia|lymphoma|ana?emia|"
    r"polycyth\w*|thrombocyth\w*|myelofibrosis)\b",
    re.IGNORECASE,
)
# Answers that a question may hold because it offers them: "Is the cytoplasm granular or agranular?", "Are vacuoles …?"
_POLAR = frozenset(("yes", "no", "present", "absent", "none", "true", "false"))
VISIBLE: dict[str, frozenset[str]] = {
    "cell": frozenset((*qa_bank.FACTS, "abnormality", "appearance", "knowledge")),
    "slide": frozenset(("cells", "differential", "abnormality", "appearance", "diagnosis", "knowledge")),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Rejected:
    """A question that was not kept: the rule, and what it found."""

    qa: QA
    rule: str
    detail: str


@dataclasses.dataclass(frozen=True, slots=True)
class Screened:
    """`kept` in the order given; `rejected` holds each other question once, under the first rule that it broke."""

    kept: tuple[QA, ...]
    rejected: tuple[Rejected, ...]

    def counts(self) -> dict[str, int]:
        """Rejected questions by rule, every rule named."""
        found = Counter(item.rule for item in self.rejected)
        return {rule: found[rule] for rule in (*ITEM_RULES, *SET_RULES)}


def format_fault(qa: QA, facts: Facts) -> str | None:
    """Lengths, options and true/false form (paper 3.2.2)."""
    words = len(qa.answer.split())
    if qa.question_type == "multiple_choice":
        folded = [option.strip().casefold() for option in qa.options]
        if not CHOICES[0] <= len(folded) <= CHOICES[1]:
            return f"{len(folded)} options, not {CHOICES[0]} to {CHOICES[1]}"
        if len(set(folded)) < len(folded) or qa.answer not in qa.options:
            return "equal options, or an answer that is none of them"
        if any(re.match(r"(?:all|none|both) of the (?:above|options)", option) for option in folded):
            return "an option about the other options"
    if qa.question_type == "fill_blank" and words >= MAX_BLANK_WORDS:
        return f"a fill-in answer of {words} words"
    if qa.question_type == "open" and (
        words > MAX_OPEN_WORDS or len(re.findall(r"[.!?](?:\s|$)", qa.answer)) > MAX_SENTENCES
    ):
        return f"an open answer of {words} words or more than {MAX_SENTENCES} sentences"
    if qa.question_type == "true_false" and qa.answer not in ("True", "False"):
        return f'a true/false answer "{qa.answer}"'
    return None


def not_smear(qa: QA, facts: Facts) -> str | None:
    """(a) Not about a peripheral blood smear: an off-topic word, or no word of the field (misspelt ones count)."""
    if found := _OFF_TOPIC.search(f"{qa.question} {qa.answer}"):
        return f'off topic: "{found.group()}"'
    named = _has_smear_term(qa.question) or _has_smear_term(" ".join((*qa.options, qa.answer)))
    return None if named else "no word of blood-smear morphology"


@functools.lru_cache(maxsize=50_000)
def _has_smear_term(text: str) -> bool:
    words = set(re.findall(r"[a-z]{4,}", text.lower()))
    singular = words | {word.removesuffix("s") for word in words}
    if singular & set(_SMEAR_TERMS):
        return True
    long = [word for word in words if len(word) >= 6]
    return any(process.extractOne(word, _SMEAR_TERMS, scorer=fuzz.ratio, score_cutoff=85) for word in long)


def wrong(qa: QA, facts: Facts) -> str | None:
    """(b) Contradicts what is recorded about the image."""
    return contradiction(qa, facts)


def not_visible(qa: QA, facts: Facts) -> str | None:
    """(c) Cannot be answered from the image: asks for what no picture of this level shows. Knowledge is exempt."""
    if qa.task == "knowledge":
        return None
    if found := _HIDDEN.search(qa.question):
        return f'not in a picture: "{found.group()}"'
    if qa.level == "cell" and (found := _OF_A_SLIDE.search(qa.question)):
        return f'a crop does not show: "{found.group()}"'
    evidence = qa.provenance.get("evidence", ())
    if hidden := [name for name in evidence if name not in VISIBLE.get(qa.level, frozenset())]:
        return f"rests on {', '.join(hidden)}"
    return None


def leaks(qa: QA, facts: Facts) -> str | None:
    """(d) The question gives its answer away: it stands in the stem, the options show it, or the diagnosis is named."""
    if qa.task == "diagnosis" and (found := _DIAGNOSIS.search(qa.question)):
        return f'a diagnosis question that names "{found.group()}"'
    if qa.level == "slide" and facts.diagnosis and _spoken(facts.diagnosis) in _spoken(qa.question):
        return f'names the recorded diagnosis "{facts.diagnosis}"'
    if qa.question_type == "true_false":
        return None
    stem, answer = _spoken(qa.question), _spoken(qa.answer)
    offered = re.search(r"\bor\b", qa.question) is not None or f" how{answer}" in stem  # "How big is this cell?"
    if (
        answer.strip() not in _POLAR
        and not offered
        and (
            answer in stem or (len(answer) >= 18 and fuzz.partial_ratio(answer, stem) >= 92 and len(answer) < len(stem))
        )
    ):
        return f'the answer "{qa.answer}" stands in the question'
    if qa.question_type == "multiple_choice" and qa.answer in qa.options:
        return _telling_options(qa)
    return None


@functools.lru_cache(maxsize=50_000)
def _spoken(text: str) -> str:
    """Lower-case words between single spaces, one at each end, so that `in` finds whole words."""
    return f" {' '.join(re.findall(r'[a-z0-9]+', text.lower().replace('true/false', '')))} "


def _telling_options(qa: QA) -> str | None:
    others = [option for option in qa.options if option != qa.answer]
    longest = max(map(len, others))
    if len(qa.answer) > LONGEST * longest and len(qa.answer) - longest >= LONGER_BY:
        return f"the right option is {len(qa.answer) / longest:.1f} times as long as any other"
    stem = set(near_duplicates.content_words(qa.question).split())
    shared = [len(stem & set(near_duplicates.content_words(option).split())) for option in (qa.answer, *others)]
    if shared[0] >= 2 and max(shared[1:]) == 0:
        return "only the right option repeats words of the question"
    return None


def subtype_of_others(qa: QA, facts: Facts) -> str | None:
    """A subtyping question about a cell outside the five types (paper 9.4)."""
    if qa.level == "cell" and qa.task == "cell_subtyping" and facts.label in (OTHERS, ARTIFACT):
        return f'asks the subtype of a cell labelled "{facts.label}"'
    return None


ITEM_RULES: dict[str, Callable[[QA, Facts], str | None]] = {
    "format": format_fault,
    "not_smear": not_smear,
    "wrong": wrong,
    "not_visible": not_visible,
    "leaks": leaks,
    "subtype_of_others": subtype_of_others,
}
SET_RULES: dict[str, Callable[[Sequence[QA]], Mapping[str, str]]] = {
    "near_duplicate": near_duplicates.within_images,
    "recurrent": near_duplicates.across_images,
    "trivial": trivial,
}
TITLES = {
    "format": "format: lengths, options, form",
    "not_smear": "(a) not about a blood smear",
    "wrong": "(b) contradicts the record",
    "not_visible": "(c) not answerable from the image",
    "leaks": "(d) gives its answer away",
    "subtype_of_others": "subtyping of Others",
    "near_duplicate": "(e) repeats a question of its image",
    "recurrent": "(e) one answer wherever it is asked",
    "trivial": "(f) a text-only probe answers it",
}


def screen(questions: Iterable[QA], facts: Mapping[str, Facts]) -> Screened:
    """Applies every rule; the set rules see what the item rules left. `facts` by image id, {} where none are known."""
    left: list[QA] = []
    rejected: list[Rejected] = []
    for qa in questions:
        known = facts.get(qa.image_id, NO_FACTS)
        for name, rule in ITEM_RULES.items():
            if detail := rule(qa, known):
                rejected.append(Rejected(qa, name, detail))
                break
        else:
            left.append(qa)
    for name, set_rule in SET_RULES.items():
        found = set_rule(left)
        rejected += [Rejected(qa, name, found[qa.id]) for qa in left if qa.id in found]
        left = [qa for qa in left if qa.id not in found]
    return Screened(tuple(left), tuple(rejected))


def reject_record(item: Rejected) -> dict[str, Any]:
    """The JSON object of a rejects line: the question whole, its rule and what the rule found."""
    return {"reject_rule": item.rule, "reject_detail": item.detail, **released_record(item.qa)}
