"""Shared fixtures: eight fake CPU devices, the shared data when at hand, a count of what was skipped without it."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path

import pytest

# Before anything imports jax: tests see the same eight devices on every machine, in this process and in children.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# Most programs here run for milliseconds and compile for seconds: LLVM need not optimise them (a third of the time saved).
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

ROOT = Path(__file__).resolve().parent.parent
# Compiling is most of what the tests of training cost: workers, children and the next run share the programs.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "xla"))
SHARED_REASON = "shared data not found: lay it beside the repository as ../shared, or set PBS_SHARED"

NOT_REACHED = "not reached before the deadline"
LONG = {"train", "weights", "decode", "models"}  # folders that begin, so that all workers end at about the same time


def shared_root() -> Path | None:
    """The folder of real images, annotations and golden numbers, or None."""
    root = Path(os.environ.get("PBS_SHARED") or ROOT.parent / "shared")
    return root if (root / "data").is_dir() else None


@pytest.fixture(scope="session")
def shared() -> Path:
    root = shared_root()
    if root is None:
        pytest.skip(SHARED_REASON)
    return root


@pytest.fixture(scope="session")
def repo() -> Path:
    return ROOT


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # First what compiles for a real TPU: CI gives the slow tests five minutes, and must reach it.
    items.sort(key=lambda item: (item.path.name != "test_aot.py", item.path.parent.name not in LONG))
    if importlib.util.find_spec("torch") is None:
        for item in items:
            if item.get_closest_marker("torch"):
                item.add_marker(pytest.mark.skip(reason="torch is not installed: pip install pbs-jax[torch]"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    deadline = float(os.environ.get("PBS_TEST_DEADLINE", "inf"))
    if item.get_closest_marker("slow") and time.time() > deadline:
        pytest.skip(NOT_REACHED)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    missing = sum(SHARED_REASON in str(report.longrepr) for report in skipped)
    if missing:
        terminalreporter.write_line(f"{missing} tests skipped for want of shared data ({SHARED_REASON})")
    late = [report.nodeid for report in skipped if NOT_REACHED in str(report.longrepr)]
    if late:
        terminalreporter.write_line(f"{len(late)} slow tests not reached before the deadline: {', '.join(late)}")
