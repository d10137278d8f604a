"""`gcloud` of the tests: buckets and machines are folders below FAKE_CLOUD, and every call is a line of FAKE_CLOUD/calls.

FAKE_CLOUD/script says what happens at each start of the training, a line each: an exit code, or "preempt".
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

CLOUD = Path(os.environ["FAKE_CLOUD"])


def place(address: str) -> Path:
    return CLOUD / "buckets" / address.removeprefix("gs://") if address.startswith("gs://") else Path(address)


def storage(verb: str, arguments: list[str]) -> int:
    flags = [a for a in arguments if a.startswith("--")]
    paths = [place(a) for a in arguments if not a.startswith("--")]
    if (CLOUD / "storage_down").exists():
        print("ERROR: the service is not available", file=sys.stderr)
        return 1
    if verb == "rsync":
        exclude = next((f.partition("=")[2] for f in flags if f.startswith("--exclude=")), "$^")
        sync(*paths, exclude, "--delete-unmatched-destination-objects" in flags)
        return 0
    if not paths[0].exists():
        print("ERROR: One or more URLs matched no objects.", file=sys.stderr)
        return 1
    if verb == "cp":
        paths[1].parent.mkdir(parents=True, exist_ok=True)
        upload(*paths)
    elif verb == "rm":
        paths[0].unlink()
    else:
        print(paths[0].read_text() if verb == "cat" else paths[0])
    return 0


def upload(source: Path, target: Path) -> None:
    """An object is in a bucket whole or not at all, whenever the copying process is killed."""
    part = CLOUD / f"upload-{os.getpid()}"
    shutil.copy2(source, part)
    os.replace(part, target)


def sync(source: Path, target: Path, exclude: str, delete: bool) -> None:
    """As gcloud: the pattern is matched from the start of the relative path, and what it matches is not deleted."""
    names = {
        p.relative_to(source)
        for p in source.rglob("*")
        if p.is_file() and not re.match(exclude, str(p.relative_to(source)))
    }
    for name in sorted(names):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        upload(source / name, target / name)
    for path in list(target.rglob("*")) if delete else []:
        name = path.relative_to(target)
        if path.is_file() and name not in names and not re.match(exclude, str(name)):
            path.unlink()


def machine(kind: str, verb: str, arguments: list[str]) -> int:
    state = CLOUD / f"{kind}-{arguments[0]}"
    up = "READY" if kind == "tpu-vm" else "ACTIVE"
    if verb == "create":
        state.write_text(up)
        (CLOUD / f"tpu-vm-{arguments[0]}").write_text("READY")  # the node of a queued resource, too
    elif verb == "delete":
        state.unlink()
        (CLOUD / f"tpu-vm-{arguments[0]}").unlink(missing_ok=True)
    elif verb == "describe":
        if not state.exists():
            print("ERROR: (gcloud) NOT_FOUND: it could not be found", file=sys.stderr)
            return 1
        print("WARNING: a new version of gcloud is there", file=sys.stderr)
        hosts = CLOUD / "hosts"
        print((hosts.read_text() if hosts.exists() else "1") if "len()" in arguments[-1] else state.read_text())
    elif "tpu_worker.sh start" in arguments[-1]:
        remote = place(next(word for word in shlex.split(arguments[-1]) if word.startswith("gs://")))
        script = CLOUD / "script"
        event, *rest = script.read_text().split()
        script.write_text(" ".join(rest))
        if event == "preempt":
            for owner in CLOUD.glob(f"*-{arguments[0]}"):
                owner.write_text("PREEMPTED" if owner.name.startswith("tpu-vm") else "SUSPENDED")
        else:
            remote.mkdir(parents=True, exist_ok=True)
            (remote / "exit_code").write_text(event)
            (remote / "train.log").write_text("pbs: the loss is not finite\n")
    return 0


def main(arguments: list[str]) -> int:
    with (CLOUD / "calls").open("a") as calls:
        calls.write(shlex.join(arguments) + "\n")
    if arguments[0] == "storage":
        return storage(arguments[1], arguments[2:])
    return machine(arguments[2], arguments[3], arguments[4:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
