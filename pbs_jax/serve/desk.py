"""The desk behind the page: pictures that were opened, kept for a while, and one worker that opens and asks.

One thread computes, so a request waits its turn; more than `max_waiting` are turned away. Pictures beyond KEPT are dropped,
the least recently used first, with their files. Nothing of a client becomes a path.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import dataclasses
import secrets
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from data_prep.picture import SUFFIXES, Picture, open_picture, region
from data_prep.schema import DataError
from pbs_jax.ask import picture as asking
from pbs_jax.ask.cli import as_json
from pbs_jax.ask.evaluate import QUESTION
from pbs_jax.ask.evidence import Evidence
from pbs_jax.decode.answer import MAX_NEW
from pbs_jax.serve.chat import ChatRequest, Reply, ended, sure

KEPT = 16
CELL_QUESTION = "What type of white blood cell is this?"  # offered by the page where cells are asked
CHAT_KINDS = ("png", "jpeg", "jpg", "webp", "bmp")
AROUND = 512  # px of the slide shown around a cell


class Busy(Exception):
    """Too many requests wait."""


class Unknown(Exception):
    """No such picture, slide or cell: it was never there, or dropped for newer ones."""


@dataclasses.dataclass
class Entry:
    """An opened picture; `file` only while its pixels may be asked for again (slides); `ready` once it was read."""

    picture: Picture
    folder: Path
    file: Path | None
    ready: asking.Ready | None = None
    seen: dict[int, Evidence] = dataclasses.field(default_factory=dict)


class Desk:
    """A context manager; the methods without `async` are for the worker, by way of `run`."""

    def __init__(self, models: asking.Models, slides: Path | None = None, max_waiting: int = 64) -> None:
        self.models = models
        self._slides = _listed(slides)
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._pool = ThreadPoolExecutor(1, "desk")
        self._waiting, self._most = 0, max_waiting
        self._folder = Path(tempfile.mkdtemp(prefix="pbs-serve-"))

    def __enter__(self) -> Desk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def run[T](self, gone: Callable[[], Awaitable[bool]], work: Callable[[], T]) -> T | None:
        """`work()` by the worker; None when the client is gone before its turn. Raises Busy."""
        if self._waiting >= self._most:
            raise Busy
        self._waiting += 1
        try:
            future = self._pool.submit(work)
            task = asyncio.wrap_future(future)
            while not (await asyncio.wait([task], timeout=0.5))[0]:
                if await gone() and future.cancel():
                    return None
            return task.result()
        finally:
            self._waiting -= 1

    def about(self) -> dict[str, Any]:
        """What the page says of the server."""
        return {
            "checkpoint": self.models.name,
            "remark": self.models.remark,
            "slides": [{"id": k, "name": name} for k, (name, _) in enumerate(self._slides)],
        }

    def new_file(self, name: str) -> Path:
        """Where an upload is to be written: a drawn name, with the client's ending if it is one that is read."""
        suffix = Path(name).suffix.casefold()
        folder = self._new_folder() / "upload"  # beside what is made of it, which may not lie among the slides
        folder.mkdir()
        return folder / f"picture{suffix if suffix in SUFFIXES else '.bin'}"

    def discard(self, file: Path) -> None:
        """Drops an upload that came to nothing."""
        _drop(file.parent.parent)

    def opened(self, file: Path, name: str, kind: str, mpp: float) -> dict[str, Any]:
        """Opens an uploaded file. Raises DataError, and then the file is gone."""
        return self._open(file, file.parent.parent, name, kind, mpp)

    def opened_slide(self, number: int, mpp: float) -> dict[str, Any]:
        """Opens a slide of the list."""
        if not 0 <= number < len(self._slides):
            raise Unknown
        name, path = self._slides[number]
        return self._open(path, self._new_folder(), name, "auto", mpp)

    def _new_folder(self) -> Path:
        """One picture's: all that is written for it lies below, and goes with it."""
        folder = self._folder / secrets.token_hex(8)
        folder.mkdir()
        return folder

    def _open(self, file: Path, folder: Path, name: str, kind: str, mpp: float) -> dict[str, Any]:
        models = self.models
        try:
            found = open_picture(
                file, models.prepare, kind=kind, mpp=mpp, work=folder / "work", backbone=models.backbone,
                classify=models.classify, name=name,
            )  # fmt: skip
        except BaseException:
            _drop(folder)
            raise
        if found.kind != "slide" and file.is_relative_to(self._folder):
            file.unlink()
        id = secrets.token_hex(8)
        self._entries[id] = Entry(found, folder, file if found.kind == "slide" else None)
        while len(self._entries) > KEPT:
            _, old = self._entries.popitem(last=False)
            _drop(old.folder)
        by_slide = found.kind == "slide" and models.slide is not None
        return {"id": id, "question": QUESTION if by_slide else CELL_QUESTION} | as_json(found, [], models, None)

    def _entry(self, id: str) -> Entry:
        if id not in self._entries:
            raise Unknown
        self._entries.move_to_end(id)
        return self._entries[id]

    def _ready(self, id: str) -> tuple[Entry, asking.Ready]:
        entry = self._entry(id)
        entry.ready = entry.ready or asking.ready(entry.picture, self.models)
        return entry, entry.ready

    def overview(self, id: str) -> bytes:
        """JPEG of the whole picture."""
        return self._entry(id).picture.overview

    def cell(self, id: str, number: int, around: bool) -> bytes:
        """JPEG of a cell as the model sees it; around: of AROUND px of the slide about it."""
        entry = self._entry(id)
        if not 0 <= number < len(entry.picture.cells):
            raise Unknown
        cell = entry.picture.cells[number]
        return region(entry.file, cell.bbox, AROUND) if around and entry.file else cell.image

    def asked(self, id: str, question: str, options: list[str], kind: str) -> dict[str, Any]:
        """The answer to one question as JSON."""
        _, ready = self._ready(id)
        answer = asking.ask(ready, asking.as_question(question, options, kind, ready.level))
        return dataclasses.asdict(answer) | {"sentence": answer.sentence}

    def evidence(self, id: str, cell: int) -> dict[str, Any]:
        """What the model looked at: caption, places, overlay as a data URL."""
        entry, ready = self._ready(id)
        if not 0 <= cell < len(entry.picture.cells):
            raise Unknown
        if cell not in entry.seen:
            entry.seen[cell] = asking.looked_at(ready, cell)
        seen = entry.seen[cell]
        overlay = f"data:image/jpeg;base64,{base64.b64encode(seen.overlay).decode()}"
        return {"caption": seen.caption, "top": seen.top, "overlay": overlay, "level": ready.level}

    def chat(self, asked: ChatRequest, tell: Callable[[str], None]) -> Reply:
        """The reply to one question about one picture, which is not kept; tell: called with what of it is sure so far."""
        head, _, body = asked.picture.partition(",")
        kind = head.removeprefix("data:image/").partition(";")[0]
        if not head.startswith("data:image/") or not head.endswith(";base64"):
            raise DataError(
                "image_url is no data:image/…;base64 URL: pictures are sent with the question, none is fetched"
            )
        if kind not in CHAT_KINDS:
            raise DataError(
                f"the picture is of type {kind[:20]}: send {', '.join(CHAT_KINDS)}; slides are opened in the page"
            )
        file = self.new_file(f"picture.{kind}")
        try:
            file.write_bytes(base64.b64decode(body, validate=True))
            name = f"the {kind} picture"
            found = open_picture(
                file, self.models.prepare, work=file.parent.with_name("work"), classify=self.models.classify, name=name
            )
            ready = asking.ready(found, self.models)
            qa = asking.released_question(asked.text)
            tokenizer = ready.answerer.tokenizer
            answer = asking.ask(ready, qa, asked.sampling, tell=lambda text: tell(sure(text, asked, tokenizer)))
        except binascii.Error as error:
            raise DataError(f"the picture's base64 does not decode ({error})") from error
        finally:
            self.discard(file)
        read = len(ready.prefix.ids) + len(tokenizer.encode(asked.text))
        return ended(answer.text, asked, tokenizer, MAX_NEW[qa.question_type], read)


def _drop(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _listed(folder: Path | None) -> list[tuple[str, Path]]:
    """(name, path) of the slides below a folder; links that leave it are left out. Raises DataError when it is no folder."""
    if folder is None:
        return []
    if not folder.is_dir():
        raise DataError(f"--slides {folder} is not a folder")
    root = folder.resolve()
    files = sorted(path for path in root.rglob("*") if path.suffix.casefold() in SUFFIXES and path.is_file())
    inside = [path for path in files if path.resolve().is_relative_to(root)]
    # A name on disk may be no text, which JSON cannot say.
    return [(path.relative_to(root).as_posix().encode(errors="replace").decode(), path) for path in inside]
