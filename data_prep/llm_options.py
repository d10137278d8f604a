"""The command-line options of everything that asks a language model. Imports nothing, so that `--help` stays quick."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

PROVIDERS = ("openai", "replay")


def add_llm_arguments(
    parser: argparse.ArgumentParser, providers: Sequence[str] = PROVIDERS, required: bool = True
) -> None:
    """The options that `client_from_args` reads. --provider has no default: nothing leaves the machine unasked."""
    group = parser.add_argument_group("language model")
    group.add_argument("--provider", required=required, choices=providers, help="who answers; openai sends data out")
    group.add_argument("--base-url", help="address of a compatible service or a local server (default: the SDK's)")
    group.add_argument("--key-env", default="OPENAI_API_KEY", help="environment variable that holds the key")
    group.add_argument("--max-usd", type=float, help="never spend more than this, all runs of the store together")
    group.add_argument("--max-requests", type=int, help="never send more than this, all runs of the store together")
    group.add_argument("--prices", type=Path, help='TOML: [models."NAME"] input=, output= (USD per million tokens)')
    group.add_argument("--allow-unpriced", action="store_true", help="--max-usd may go without a model's price")
    group.add_argument("--llm-workers", type=int, default=4, help="requests at a time (default 4)")
    group.add_argument("--timeout", type=float, default=120.0, help="seconds an answer may take (default 120)")
    group.add_argument("--retry-rejected", action="store_true", help="ask again what the service rejected before")
