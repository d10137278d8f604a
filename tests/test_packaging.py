"""What a wheel carries, which packages are declared, and that the launch scripts are sound."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

# Import name -> distribution, where they differ.
DISTRIBUTION = {
    "PIL": "pillow",
    "absl": "absl-py",
    "openslide": "openslide-python",
    "orbax": "orbax-checkpoint",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
}
OURS = {"pbs_jax", "data_prep", "configs", "tests"}


@pytest.fixture(scope="module")
def project(repo: Path) -> dict[str, Any]:
    return tomllib.loads((repo / "pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> set[str]:
    return {canonical(re.split(r"[<>=\[;!~ ]", line)[0]) for line in requirements}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_what_the_user_named_is_declared(project: dict[str, Any]) -> None:
    core = names(project["dependencies"])
    assert {"jax", "flax", "optax", "orbax-checkpoint", "grain", "transformers", "tensorflow-datasets"} <= core
    assert {"openslide-python", "openslide-bin", "ml-collections", "rouge-score"} <= core
    assert not {"torch", "tensorflow"} & core
    extras = project["optional-dependencies"]
    assert {"demo", "torch", "cellpose", "llm", "beam", "tpu", "gpu", "test", "all"} <= set(extras)
    assert "sentence-transformers" in names(extras["demo"])
    assert project["requires-python"] == ">=3.12"


def test_every_import_is_declared(repo: Path, project: dict[str, Any]) -> None:
    declared = names(project["dependencies"]).union(*(names(v) for v in project["optional-dependencies"].values()))
    for package in ("pbs_jax", "data_prep", "configs"):
        for path in (repo / package).rglob("*.py"):
            for name in imported(path):
                if name in sys.stdlib_module_names or name in OURS:
                    continue
                wanted = canonical(DISTRIBUTION.get(name, name))
                assert wanted in declared, f"{path} imports {name}, which no extra declares"


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def test_constraints_are_names_and_versions(repo: Path, project: dict[str, Any]) -> None:
    lines = [
        line for line in (repo / "launch" / "constraints.txt").read_text().splitlines() if not line.startswith("#")
    ]
    assert all(re.fullmatch(r"[a-z0-9-]+==[A-Za-z0-9.+!]+", line) for line in lines)
    pinned = {line.partition("==")[0] for line in lines}
    extras = project["optional-dependencies"]
    declared = names(project["dependencies"]).union(*(names(extras[k]) for k in extras)) - {"pbs-jax", "tensorflow"}
    assert declared <= pinned, "tensorflow alone is unpinned: extra qc goes into an environment of its own"


def test_launch_scripts_are_sound(repo: Path) -> None:
    scripts = [repo / "launch" / name for name in ("demo.sh", "test.sh")] + [repo / ".ci" / "run"]
    for path in [*scripts, repo / "launch" / "setup.sh"]:
        subprocess.run(["bash", "-n", str(path)], check=True)
    assert all(os.access(path, os.X_OK) for path in scripts)


def test_setup_finds_this_python_and_refuses_without(repo: Path) -> None:
    code = "source launch/setup.sh && find_python"
    env = {"PATH": os.environ["PATH"], "HOME": "nowhere", "PBS_PYTHON": sys.executable}
    found = subprocess.run(["bash", "-c", code], cwd=repo, env=env, capture_output=True, text=True)
    assert found.returncode == 0 and Path(found.stdout.strip()).resolve() == Path(sys.executable).resolve()
    empty = {"PATH": "/usr/bin:/bin", "HOME": "nowhere", "PYENV_ROOT": "nowhere"}
    has_new = subprocess.run(["bash", "-c", "source launch/setup.sh && usable python3"], cwd=repo, env=empty).returncode
    if has_new:
        refused = subprocess.run(["bash", "-c", code], cwd=repo, env=empty, capture_output=True, text=True)
        assert refused.returncode != 0 and "no Python >= 3.12" in refused.stderr


def test_setup_refuses_a_full_disk_before_it_installs(repo: Path, tmp_path: Path) -> None:
    """pip downloads for minutes before it says so."""
    df = tmp_path / "df"
    df.write_text("#!/bin/sh\necho Filesystem\necho /dev/x 99000000 90300000 8700000 92% /\n")
    df.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PBS_VENV": str(tmp_path)}
    room = "source launch/setup.sh && room {} && echo enough"
    run = [
        subprocess.run(["bash", "-c", room.format(extras)], cwd=repo, env=env, capture_output=True, text=True)
        for extras in ("test demo", "tpu")
    ]
    assert run[0].returncode == 1 and f"needs 12 GB of disk, 8 are free at {tmp_path}" in run[0].stderr
    assert run[1].returncode == 0 and "enough" in run[1].stdout


@pytest.mark.slow
def test_the_wheel_carries_configs_styles_and_command(repo: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"  # setuptools writes into the tree that it builds
    for name in ("pbs_jax", "data_prep", "configs"):
        shutil.copytree(repo / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repo / name, copy / name)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", str(tmp_path), str(copy)]
    subprocess.run(build, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("pbs_jax-*.whl"))) as wheel:
        inside = set(wheel.namelist())
        entry = next(name for name in inside if name.endswith("entry_points.txt"))
        assert "pbs = pbs_jax.cli:main" in wheel.read(entry).decode()
    assert {"configs/base.py", "configs/phase3_cell_qa.py", "data_prep/report.css"} <= inside
    assert any(name.endswith("licenses/LICENSE") for name in inside)
    for package in ("pbs_jax", "data_prep", "configs"):
        missing = {str(path.relative_to(repo)) for path in (repo / package).rglob("*.py")} - inside
        assert not missing, f"the wheel lacks {sorted(missing)}"
