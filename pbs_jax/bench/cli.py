"""`pbs bench audit | run | score | gain | compare | report`: parsers and the files each command writes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pbs_jax.bench.cli_boards import add_board_parsers

if TYPE_CHECKING:
    from data_prep.schema import QA
    from pbs_jax.bench.adapters import Options
    from pbs_jax.bench.compare import Comparison
    from pbs_jax.bench.evaluate import Settings
    from pbs_jax.bench.gain import Gain
    from pbs_jax.bench.records import Questions
    from pbs_jax.bench.score import Run
    from pbs_jax.bench.tables import Table


def add_parser(subparsers: Any) -> None:
    bench = subparsers.add_parser("bench", help="score models on PBSBench, with the rows that never see the image")
    commands = bench.add_subparsers(metavar="COMMAND", dest="command", required=True)

    audit = commands.add_parser(
        "audit", help="what a question set gives away: positions, T/F balance, leakage, validity"
    )
    audit.add_argument("data", type=Path, help="folder of released JSONL files, or a dataset (OUT or OUT/cell_qa)")
    audit.add_argument("--out", type=Path, help="also write audit.json and audit.md here")
    audit.set_defaults(run=_audit)

    asks = commands.add_parser(
        "ask",
        help="`pbs ask` on whole mosaics with known cells, and on files it should refuse",
        description="From file to answer: how often the most frequent white cell is named right, beside one who always says "
        "Neutrophil and beside the same slides before their white cells were laid in; where the attention falls; refusals.",
    )
    asks.add_argument(
        "--checkpoint", type=Path, action="append", required=True, metavar="WORKDIR", help="as of pbs ask"
    )
    asks.add_argument("--mosaics", type=Path, required=True, help="folder of `pbs data mosaic`")
    asks.add_argument("--others", type=Path, help="folder of slides and pictures that are no blood smears")
    asks.add_argument("--limit", type=int, help="only the first N test slides")
    asks.set_defaults(run=_ask)

    run = commands.add_parser("run", help="ask a model every question; continues where it stopped")
    _add_models(run)
    run.add_argument(
        "--data", type=Path, required=True, help="OUT of `pbs data run` (cells and cell_qa, or a slide job)"
    )
    run.add_argument("--questions", type=Path, help="ask these instead of data's own: released JSONL, or a dataset")
    run.add_argument("--split", default="test", help="split asked (default: test)")
    run.add_argument("--out", type=Path, required=True, help="run folder: predictions.jsonl and run.json")
    run.add_argument(
        "--modality",
        choices=("image", "blind", "blank", "mismatched"),
        default="image",
        help="the picture (default), none, a grey one, or another cell's or slide's",
    )
    run.add_argument(
        "--mode",
        choices=("generate", "letter_likelihood"),
        default="generate",
        help="write the answer (default), or take the likeliest letter or truth value",
    )
    run.add_argument(
        "--protocol",
        choices=("shuffle", "as_released", "circular"),
        default="shuffle",
        help="order of options: seeded by id (default), the file's (the gold stands first in 9 of 10), every rotation",
    )
    run.add_argument("--name", help="the model's name in tables (default: from --model)")
    run.add_argument(
        "--seed", type=int, help="the model's training seed, for tables over seeds (default: from the model)"
    )
    run.add_argument("--batch-size", type=int, default=512, help="questions asked and recorded at a time")
    run.add_argument("--limit", type=int, help="only the first N questions")
    run.add_argument(
        "--patches",
        type=int,
        help="patches shown of a slide (default 30 pictures, or as many features as our model learnt from; the paper: 15, 30, 50)",
    )
    run.add_argument("--cache", type=Path, help="folder of answers that several runs share, found by content")
    run.add_argument("--dry-run", action="store_true", help="ask nothing: say how much would be asked and may be paid")
    run.add_argument(
        "--features", type=Path, help="folder of the slide_features that a slide model reads (default: --data)"
    )
    run.set_defaults(run=_run)

    score = commands.add_parser("score", help="score one predictions file")
    score.add_argument("predictions", type=Path, help="predictions.jsonl, or a run folder")
    add_scoring(score)
    score.add_argument("--errors-as-wrong", action="store_true", help="score errors as empty answers")
    score.set_defaults(run=_score)

    gain = commands.add_parser("gain", help="what the image adds: each model with it minus without it, paired")
    gain.add_argument("runs", type=Path, nargs="+", help="run folders of one --name with --modality image and another")
    add_scoring(gain)
    gain.set_defaults(run=_gain)

    versus = commands.add_parser("compare", help="paired differences of the first model from each of the others")
    versus.add_argument("runs", type=Path, nargs="+", help="run folders or predictions files; one name, several seeds")
    add_scoring(versus)
    versus.add_argument(
        "--family",
        choices=("track", "metric"),
        default="track",
        help="tests that Holm's correction takes together: all of a track (default), or each metric's of a track",
    )
    versus.set_defaults(run=_compare)

    report = commands.add_parser(
        "report", help="tables over models and seeds, attribute by attribute; HTML, Markdown, JSON"
    )
    report.add_argument("runs", type=Path, nargs="+", help="run folders; those of one name are seeds of one model")
    add_scoring(report)
    report.add_argument("--title", default="PBSBench report")
    report.add_argument("--pictures", type=Path, help="dataset folder with the pictures (default: --data or --train)")
    report.add_argument(
        "--variant", type=Path, nargs="+", default=[], help="runs of the same models on `pbs bench variant` questions"
    )
    report.set_defaults(run=_report)
    add_board_parsers(commands, add_scoring)


def _add_models(parser: argparse.ArgumentParser) -> None:
    from data_prep.llm import add_llm_arguments
    from pbs_jax.bench.adapters import SPECS

    parser.add_argument("--model", required=True, help=SPECS)
    parser.add_argument("--device", default="auto", help="of hf models: cpu, cuda, … (default: cuda if there is one)")
    parser.add_argument(
        "--dtype", default="auto", help="of hf models: float32, bfloat16, … (default: the checkpoint's)"
    )
    parser.add_argument(
        "--model-batch", type=int, default=8, help="questions that an hf model reads together (default 8)"
    )
    parser.add_argument("--start-timeout", type=float, default=1800.0, help="seconds a child may load (default 1800)")
    parser.add_argument(
        "--params", type=json.loads, default={}, help="of a server, JSON; null leaves a default one out"
    )
    add_llm_arguments(parser, required=False)


def _options(args: argparse.Namespace) -> Options:
    from pbs_jax.bench.adapters import Options

    named = {"workers": args.llm_workers, "again": args.retry_rejected, "provider": args.provider or "openai"}
    same = ("base_url", "key_env", "timeout", "max_usd", "max_requests", "prices", "allow_unpriced")
    return Options(
        device=args.device,
        dtype=args.dtype,
        batch=args.model_batch,
        timeout=args.timeout,
        start_timeout=args.start_timeout,
        params=args.params,
        service=named | {name: getattr(args, name) for name in same},
        store=args.cache or args.out,
    )


def add_scoring(parser: argparse.ArgumentParser) -> None:
    from pbs_jax.bench.records import CLUSTERS

    parser.add_argument("--data", type=Path, help="the questions: checks coverage, takes options and gold from there")
    parser.add_argument("--split", help="split of --data (default: all)")
    parser.add_argument("--train", type=Path, help="training questions, for the blind rows that learn answers")
    parser.add_argument("--profile", default="paper,robust", help="comma-separated (default: paper,robust)")
    parser.add_argument(
        "--cluster", choices=CLUSTERS, default="auto", help="unit resampled (default: patient, slide, image)"
    )
    parser.add_argument("--draws", type=int, default=10_000, help="bootstrap draws (default: 10000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the bootstrap")
    parser.add_argument("--no-sim", action="store_true", help="leave out Sim (the only part that needs torch)")
    parser.add_argument("--sim-model", help="folder of a sentence-transformers model (default: the packaged MiniLM)")
    parser.add_argument("--sim-cache", type=Path, help="folder of kept embeddings (default: ~/.cache/pbs_jax)")
    parser.add_argument("--out", type=Path, help="folder for the results (default: beside the predictions)")


def settings_of(args: argparse.Namespace) -> Settings:
    from data_prep.schema import DataError
    from pbs_jax.bench import similarity
    from pbs_jax.bench.evaluate import Settings
    from pbs_jax.bench.extract import PROFILES

    profiles = tuple(args.profile.split(","))
    if unknown := sorted(set(profiles) - set(PROFILES)):
        raise DataError(f"--profile {','.join(unknown)} is unknown: use {' or '.join(PROFILES)}")
    model = None if args.no_sim else similarity.load(args.sim_model, args.sim_cache or similarity.default_cache())
    if model is None:
        why = "left out" if args.no_sim else "sentence-transformers or its model is not installed"
        print(f"Sim: not computed ({why})")
    return Settings(profiles, args.cluster, args.draws, args.seed, model)


def train_of(args: argparse.Namespace) -> Sequence[QA] | None:
    from pbs_jax.bench.records import dataset_of, load_questions

    if args.train is None:
        return None
    if dataset_of(args.train):
        return load_questions(args.train, "train").items
    items = load_questions(args.train).items
    trained = {qa.level for qa in items if qa.split == "train"}
    # Of the release's cell questions only the validation file is at hand: it stands in.
    return [qa for qa in items if qa.split == ("train" if qa.level in trained else "val")] or items


def _audit(args: argparse.Namespace) -> int:
    from data_prep.io import atomic_write
    from pbs_jax.bench import audit, audit_tables, tables

    found = audit.audit(args.data)
    text = "\n".join(tables.to_markdown(table) for table in audit_tables.to_tables(found))
    print(text)
    if args.out:
        atomic_write(args.out / "audit.json", json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        atomic_write(args.out / "audit.md", text)
    changed = [file["name"] for file in found["files"] if file["as_pinned"] is False]
    if changed:
        print(f"not as released: {', '.join(changed)}; scores on them are not PBSBench's")
    return 3 if changed else 0


def _ask(args: argparse.Namespace) -> int:
    from pbs_jax.ask.evaluate import report

    print(report(args.checkpoint, args.mosaics, args.others, args.limit))
    return 0


def _run(args: argparse.Namespace) -> int:
    from pbs_jax.bench import run

    return run.run(
        args.model,
        args.data,
        args.out,
        split=args.split,
        modality=args.modality,
        mode=args.mode,
        protocol=args.protocol,
        name=args.name,
        seed=args.seed,
        batch_size=args.batch_size,
        limit=args.limit,
        questions_from=args.questions,
        patches=args.patches,
        cache=args.cache,
        features=args.features,
        dry_run=args.dry_run,
        options=_options(args),
    )


def _score(args: argparse.Namespace) -> int:
    from data_prep.io import atomic_write
    from pbs_jax.bench import circular, score, tables
    from pbs_jax.bench.records import load_questions

    questions = load_questions(args.data, args.split) if args.data else None
    run = score.load_run(args.predictions, questions)
    settings = settings_of(args)
    scores = score.score_runs(
        [run], settings, train=train_of(args), expected=questions, errors_as_wrong=args.errors_as_wrong
    )
    made = tables.all_tables(scores.cells, notes=scores.notes)
    if scores.origin.protocol == "circular":
        made += circular.to_tables(circular.circular(scores, settings, settings.profiles[-1]))
    out = args.out or (args.predictions if args.predictions.is_dir() else args.predictions.parent)
    atomic_write(out / "scores.json", json.dumps(scores.to_json(), indent=1, ensure_ascii=False) + "\n")
    atomic_write(out / "tables.md", "\n".join(map(tables.to_markdown, made)))
    atomic_write(out / "tables.tex", "\n".join(map(tables.to_latex, made)))
    atomic_write(out / "scores.csv", tables.to_csv(scores.cells))
    print("\n".join(tables.to_markdown(table) for table in made if "by task" not in table.title))
    for row in scores.rows:
        if row.note:
            print(f"{row.name}: {row.note}")
    print(f"written: {out}/scores.json, scores.csv, tables.md, tables.tex")
    return 0


def _loaded(args: argparse.Namespace) -> tuple[Questions | None, list[Run]]:
    from pbs_jax.bench import score
    from pbs_jax.bench.records import load_questions

    questions = load_questions(args.data, args.split) if args.data else None
    return questions, [score.load_run(path, questions) for path in args.runs]


def _say(table: Table, found: Sequence[Gain | Comparison], file: Path | None) -> int:
    from data_prep.io import atomic_write
    from pbs_jax.bench import tables

    print(tables.to_markdown(table))
    if file:
        text = json.dumps([item.to_json() for item in found], indent=1, ensure_ascii=False)
        atomic_write(file, text + "\n")
    return 0


def _gain(args: argparse.Namespace) -> int:
    from pbs_jax.bench import gain, score

    questions, runs = _loaded(args)
    args.no_sim = True  # one metric per question type is compared, and none of them is Sim
    settings = settings_of(args)
    found = gain.gains(score.score_runs(runs, settings, expected=questions), runs, settings, settings.profiles[-1])
    return _say(gain.to_table(found), found, args.out and args.out / "gain.json")


def _compare(args: argparse.Namespace) -> int:
    from data_prep.schema import DataError
    from pbs_jax.bench import compare, score

    questions, runs = _loaded(args)
    first, *others = dict.fromkeys(run.label for run in runs)
    if not others:
        raise DataError(f'all runs are of "{first}": give runs of two models or modalities')
    args.no_sim = True
    settings, pairs = settings_of(args), [(first, other) for other in others]
    answers = score.gather(runs, expected=questions)
    found = compare.compare(answers, pairs, settings, settings.profiles[-1], args.family)
    table = compare.to_table(f"{first} against others", found, args.family)
    return _say(table, found, args.out and args.out / "compare.json")


def _report(args: argparse.Namespace) -> int:
    from pbs_jax.bench import report, score

    questions, runs = _loaded(args)
    report.write(
        args.out or args.runs[0].parent,
        runs,
        settings_of(args),
        train=train_of(args),
        expected=questions,
        title=args.title,
        data=args.pictures or args.data or args.train,
        altered=[score.load_run(path) for path in args.variant],
    )
    return 0
