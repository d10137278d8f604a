"""`pbs serve --checkpoint WORKDIR`: the page and /v1/chat/completions on 127.0.0.1."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

from data_prep.schema import DataError
from pbs_jax.ask.cli import add_checkpoints


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="a page to ask in, and an OpenAI-compatible endpoint",
        description="Serves one page (drop a picture, see its white cells by class, ask, see what was looked at) and "
        "/v1/chat/completions. Only this machine can reach it unless --host says otherwise; there is no password. Needs the "
        "extra [serve].",
    )
    add_checkpoints(parser)
    parser.add_argument("--host", default="127.0.0.1", help="default: this machine alone")
    parser.add_argument("--port", type=int, default=8018, help="0 = any free one (default %(default)s)")
    parser.add_argument("--slides", type=Path, metavar="DIR", help="offers the slides in this folder by name")
    parser.add_argument(
        "--max_upload", type=int, default=64, metavar="MIB", help="of one picture (default %(default)s)"
    )
    parser.add_argument(
        "--max_waiting",
        type=int,
        default=64,
        metavar="N",
        help="requests that wait; more get 503 (default %(default)s)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import uvicorn

    from pbs_jax.ask.picture import load_models
    from pbs_jax.compile_cache import use_compile_cache
    from pbs_jax.serve.app import make_app
    from pbs_jax.serve.desk import Desk

    for name, low, high in (("port", 0, 65535), ("max_upload", 1, 2**20), ("max_waiting", 1, 2**20)):
        if not low <= getattr(args, name) <= high:
            raise DataError(f"--{name} is {getattr(args, name)}: give {low} to {high}")
    # By default both end the process before the uploads are deleted. uvicorn catches SIGTERM and raises it anew when it has
    # shut down; it does not know SIGHUP, which nohup has ignored.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, lambda number, frame: signal.raise_signal(signal.SIGTERM))
    use_compile_cache()
    local = args.host in ("127.0.0.1", "localhost", "::1")
    with Desk(load_models(args.checkpoint, args.int8), args.slides, args.max_waiting) as desk:
        app = make_app(desk, max_upload=args.max_upload * 2**20, local=local)
        config = uvicorn.Config(app, host=args.host, port=args.port, log_level="warning", timeout_keep_alive=30)
        socket = config.bind_socket()
        socket.listen(config.backlog)  # who reads the address below may call at once
        port = socket.getsockname()[1]
        name = f"[{args.host}]" if ":" in args.host else args.host
        print(f"pbs serve: http{'://'}{name}:{port}/ (Ctrl-C ends it)", flush=True)
        if not local:
            print("pbs serve: reachable from other machines, without a password", file=sys.stderr, flush=True)
        uvicorn.Server(config).run(sockets=[socket])
    return 0
