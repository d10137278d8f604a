"""Fetching: pinned files from a hub that stands here, checked; without a network it says what to put where."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data_prep.schema import DataError
from pbs_jax import cli
from pbs_jax.weights import fetch as module

CONTENT = {"a.safetensors": b"weights", "config.json": b"{}"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """One repository of two files and one file by hand; `served` is what the hub gives, `asked` what was downloaded."""
    import huggingface_hub

    state: dict[str, Any] = {"served": dict(CONTENT), "asked": [], "down": False}
    pins = [
        {"name": "one", "repo": "o/r", "revision": "f" * 40, "files": list(CONTENT), "import": ""},
        {"name": "two", "repo": "", "where": "a drawer", "files": ["x.pth"], "import": "x.pth"},
    ]
    (tmp_path / "hub.json").write_text(json.dumps([{"sizes": ["7b"], **pin} for pin in pins]))
    monkeypatch.setattr(module, "PINS", tmp_path / "hub.json")

    def info(self: Any, repo: str, revision: str, **options: Any) -> Any:
        if state["down"]:
            raise ConnectionError("no network")
        assert (repo, revision) == ("o/r", "f" * 40)
        lfs = {name: SimpleNamespace(sha256=hashlib.sha256(data).hexdigest()) for name, data in CONTENT.items()}
        lfs["config.json"] = None  # small files have none
        files = [SimpleNamespace(rfilename=n, size=len(d), lfs=lfs[n]) for n, d in CONTENT.items()]
        return SimpleNamespace(siblings=files)

    def download(repo: str, name: str, revision: str, local_dir: str) -> None:
        state["asked"].append(name)
        Path(local_dir).mkdir(parents=True, exist_ok=True)
        (Path(local_dir) / name).write_bytes(state["served"][name])

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return state


def test_what_is_there_is_not_fetched_again(hub: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    with pytest.raises(DataError, match=r"1 files are not there, first .*two/x\.pth \(take it from a drawer\)"):
        module.fetch("7b", out)
    assert hub["asked"] == list(CONTENT)
    (out / "two").mkdir()
    (out / "two" / "x.pth").write_bytes(b"by hand")
    assert module.fetch("7b", out) == 0
    assert hub["asked"] == list(CONTENT)
    record = json.loads((out / "fetched.json").read_text())
    assert record["two/x.pth"] == {"bytes": 7, "sha256": hashlib.sha256(b"by hand").hexdigest()}
    assert "pbs weights import one" in capsys.readouterr().out


def test_a_file_that_is_not_the_pinned_one_is_refused(hub: dict[str, Any], tmp_path: Path) -> None:
    hub["served"]["a.safetensors"] = b"weighty"
    with pytest.raises(DataError, match=r"a\.safetensors is not the file of o/r at revision ffffffffffff: delete it"):
        module.fetch("7b", tmp_path / "out", only="one")


def test_without_a_network_every_missing_file_has_its_place(hub: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    hub["down"] = True
    out = tmp_path / "out"
    assert cli.main(["weights", "fetch", "--size=7b", "--out", str(out)]) == 1
    said = capsys.readouterr()
    assert said.out.count("missing") == 3 and f"{out / 'one' / 'a.safetensors'} (no access to o/r" in said.err
    (out / "one").mkdir(parents=True)
    for name, data in CONTENT.items():
        (out / "one" / name).write_bytes(data)
    assert module.fetch("7b", out, only="one") == 0  # put there by hand


def test_small_has_nothing_to_fetch(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="size small has nothing to fetch"):
        module.fetch("small", tmp_path)


def test_the_pins_are_whole() -> None:
    pins = json.loads(module.PINS.read_text())
    assert {pin["name"] for pin in pins} == {"dinobloom", "qwen2_5_vl", "bert", "blip2"}
    assert all(len(pin["revision"]) == 40 for pin in pins if pin["repo"])
