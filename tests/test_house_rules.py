"""Rules of the house that a reviewer would otherwise have to check by eye (DESIGN sections 2 and 11)."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = ("pbs_jax", "data_prep", "configs")
MAX_LINES = 600
SUBPACKAGES = ("models", "weights", "data", "train", "sharding", "decode", "bench", "ask", "serve")
# Machine paths and network places, put together so that this file passes its own rule.
FORBIDDEN = re.compile("|".join(("/" + "root/", "/" + "work/", "/" + "home/", r"https?:/" + r"/(?!www\.apache\.org)")))


def sources(repo: Path, *folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (repo / folder).rglob("*.py"))


def test_files_are_small_and_say_what_they_are_for(repo: Path) -> None:
    for path in sources(repo, *PACKAGES, "tests"):
        text = path.read_text()
        assert len(text.splitlines()) <= MAX_LINES, f"{path} is longer than {MAX_LINES} lines"
        if text.strip():
            assert ast.get_docstring(ast.parse(text)), f"{path} has no docstring that says what it is for"


def test_no_machine_paths_or_hosts(repo: Path) -> None:
    scripts = [*(repo / "launch").iterdir(), repo / ".ci" / "run", repo / "pyproject.toml", repo / "README.md"]
    for path in [*sources(repo, *PACKAGES, "tests"), *scripts]:
        found = FORBIDDEN.search(path.read_text())
        assert not found, f'{path} holds "{found.group() if found else ""}"'


def test_nothing_unfinished_or_unsafe(repo: Path) -> None:
    for path in sources(repo, *PACKAGES):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                assert not all(isinstance(line, ast.Pass) for line in node.body), f"{path}:{node.lineno} hides an error"
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
                assert not names & {"pickle", "dill", "cloudpickle"}, f"{path}:{node.lineno} uses pickle"
                assert not any(name.startswith("tensorflow.") or name == "tensorflow" for name in names), path
        assert "TODO" not in path.read_text(), f"{path} has a TODO"


def test_the_cpu_side_never_imports_jax(repo: Path) -> None:
    modules = [".".join(path.relative_to(repo).with_suffix("").parts) for path in sources(repo, "data_prep")]
    modules = [name.removesuffix(".__init__") for name in modules]
    code = f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\n" + (
        "print(*(name for name in ('jax', 'torch', 'tensorflow', 'pbs_jax.models') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=repo)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_arrows_between_packages(repo: Path) -> None:
    allowed = {"schema", "datasets", "io", "stats", "html", "charts", "llm", "prompts", "tokens", "progress"}
    allowed |= {
        "slide_datasets",
        "slide_readers",
        "slide_report",
        "slide_table",
        "files",
        "picture",
        "drill",
        "stain_match",
        "cards",
    }
    for path in sources(repo, "pbs_jax"):
        if path.name in ("cli.py", "demo.py") or path.parent.name + "/" + path.name == "perf/tile.py":
            continue  # the last one measures data_prep's own unit of work
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("data_prep"):
                names = {node.module.partition(".")[2]} if "." in node.module else {alias.name for alias in node.names}
                assert names <= allowed, f"{path}:{node.lineno} imports data_prep.{names - allowed}"


@pytest.mark.parametrize("name", SUBPACKAGES)
def test_the_tree_is_the_designs(repo: Path, name: str) -> None:
    folder = repo / "pbs_jax" / name
    assert (folder / "__init__.py").is_file(), f"{folder} is no package"
    assert len(list(folder.glob("*.py"))) > 1, f"{folder} is empty"


def test_every_package_folder_is_a_package(repo: Path) -> None:
    for folder in {path.parent for path in sources(repo, *PACKAGES)}:
        assert (folder / "__init__.py").is_file(), f"{folder} has no __init__.py, so the wheel would lack it"
