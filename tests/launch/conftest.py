"""Fake cluster commands on PATH: each records its calls, none leaves this machine. `pbs` finds nothing wrong and is quick."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass
class Fake:
    """`folder` holds what the fakes read and write; `run` starts a launch script with them first on PATH."""

    folder: Path
    environment: dict[str, str]
    launch: Path

    def run(self, script: str, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(self.launch / script), *arguments]
        environment = self.environment | extra
        return subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
        )

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def command(self, name: str, body: str) -> None:
        """A fake command: records its call, then does `body` (bash)."""
        path = self.folder / "bin" / name
        path.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >>"$FAKE_CLOUD/calls"\n{body}\n')
        path.chmod(0o755)

    def real_pbs(self) -> None:
        """`pbs` is this repository's, so that configs are really read."""
        (self.folder / "bin/pbs").write_text(
            f'#!/usr/bin/env bash\nPYTHONPATH={self.launch.parent} exec {sys.executable} -m pbs_jax.cli "$@"\n'
        )


@pytest.fixture
def fake(tmp_path: Path, repo: Path) -> Fake:
    folder = tmp_path / "cloud"
    (folder / "bin").mkdir(parents=True)
    gcloud = folder / "bin" / "gcloud"
    gcloud.write_text(f'#!/usr/bin/env bash\nexec {sys.executable} -S {repo / "tests/launch/fake_gcloud.py"} "$@"\n')
    gcloud.chmod(0o755)
    pbs = folder / "bin" / "pbs"
    pbs.write_text("#!/usr/bin/env bash\n")
    pbs.chmod(0o755)
    environment = (
        os.environ | {"PBS": str(pbs)} | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "FAKE_CLOUD": str(folder)}
    )
    return Fake(folder, environment, repo / "launch")
