"""The versioned prompts of the caption and question writers, and the gate on what may go into them.

A prompt is `prompts_llm/NAME.vN.txt`: the system text, a line `=== user ===`, the user text, with $fields. Its version
is name, number and content hash, so that an edited prompt is never answered from the store of the old one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import re
import string
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from data_prep.schema import DataError

FOLDER = Path(__file__).parent / "prompts_llm"
_USER = "=== user ===\n"
# All that may leave the machine as text. No id, name, path, date, site, scanner or free text besides keyword comments.
ALLOWED = frozenset(
    (
        "cell_type",
        "comments",
        "caption",
        "captions",
        "n_captions",
        "diagnosis",
        "diagnosis_rule",
        "differential",
        "n_questions",
        "subtyping",
        "problem",
    )
)
MAX_COMMENT = 120  # characters of keyword comments; longer text is no keyword
_IDENTIFYING = re.compile(r"\d{4,}|\d{1,2}[./-]\d{1,2}[./-]\d{2,4}|@|\b(?:mr|mrs|ms|dr|patient|name|born|mrn)\b", re.I)


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    name: str
    version: str
    system: str
    user: str

    def render(self, fields: Mapping[str, str], private: Iterable[str] = ()) -> tuple[str, str]:
        """(system, user) with the fields filled in.

        `private`: ids and the like that must not occur in the result. Raises DataError for a field that is not
        allowed, one that is missing, or private text.
        """
        if strange := sorted(set(fields) - ALLOWED):
            raise DataError(f"prompt {self.name}: {', '.join(strange)} may not leave the machine")
        try:
            filled = tuple(string.Template(text).substitute(fields) for text in (self.system, self.user))
        except KeyError as error:
            raise DataError(f"prompt {self.name} needs the field {error}") from error
        for word in private:
            if word and word in "".join(filled):
                raise DataError(f'prompt {self.name}: the text holds "{word}", which may not leave the machine')
        return filled[0], filled[1]


def load(name: str, version: int = 1) -> Prompt:
    """Raises DataError for an unknown prompt."""
    path = FOLDER / f"{name}.v{version}.txt"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in FOLDER.glob("*.txt")))
        raise DataError(f"there is no prompt {name}.v{version}: use one of {known}")
    text = path.read_text(encoding="utf-8")
    system, _, user = text.rpartition(_USER)
    mark = f"{name}.v{version}:{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    return Prompt(name, mark, system.strip(), user.strip())


def keywords(comments: str) -> str:
    """Keyword comments that may be sent, "none" without any. Raises DataError for text that is none."""
    text = " ".join(comments.split())
    if len(text) > MAX_COMMENT or _IDENTIFYING.search(text):
        raise DataError(f'comments "{text[:40]}" are no keywords: free text may identify a person, so it is not sent')
    return text or "none"


def clean_image(data: bytes) -> bytes:
    """The picture without what cameras and scanners write into files; bytes unchanged where there is nothing.

    Returns lossless PNG where something had to go. Raises DataError for bytes that are no picture.
    """
    try:
        with Image.open(io.BytesIO(data)) as picture:
            kept = {"jfif", "jfif_version", "jfif_unit", "jfif_density", "dpi", "gamma", "lossless", "background"}
            if picture.format in ("JPEG", "PNG", "WEBP") and not set(picture.info) - kept and not picture.getexif():
                return data
            out = io.BytesIO()
            Image.fromarray(_pixels(picture)).save(out, "PNG")
            return out.getvalue()
    except OSError as error:
        raise DataError(f"these bytes are no picture ({error})") from error


def _pixels(picture: Image.Image) -> np.ndarray:
    return np.asarray(picture.convert("RGB"))
