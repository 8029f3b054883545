"""`hf-dcut bench`, and below it `report` and `replay`: their arguments."""

from __future__ import annotations

import argparse
from pathlib import Path

TARGET, DRAFTER = "models/smollm2-135m-instruct", "examples/drafter"
_QUICK = "B = 1, 4, 16, 32 on a few prompts: minutes"


def add_models(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name models."""
    parser.add_argument("--target", default=TARGET, help="folder or Hub id of the model (default: %(default)s)")
    parser.add_argument(
        "--drafter",
        default=DRAFTER,
        help="folder or Hub id of a drafter, or oracle, random, lookup; NAME+lookup for two (default: %(default)s)",
    )
    parser.add_argument("--dtype", default="auto", help="of the model, such as bfloat16 (default: as saved)")


def add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `bench` and what is below it."""
    parser = commands.add_parser("bench", help="compare methods side by side on real prompts")
    add_models(parser)
    add = parser.add_argument
    add("--assistant", default=None, help="folder or Hub id of a small model for the method assisted")
    add("--quick", action="store_true", help=_QUICK)
    add(
        "--data",
        type=words,
        default=("gsm8k",),
        help="prompt sets: shipped, JSON-lines files or hub:ID:CONFIG:SPLIT:COLUMN",
    )
    add("--batch", type=positive, default=None, help="requests at once, such as 1,4,16 (default: 1,4,16,32)")
    add(
        "--methods",
        type=words,
        default=None,
        help="generate, plain, auto, budgets in (0, 1], uniform-N, tetris-N, threshold-P, short-METHOD (a shorter "
        "block is fed), tree-METHOD (draft trees), static-compile, assisted, prompt-lookup, generate-batch (default: "
        "generate, plain, 1.0, 0.25, 0.5, 0.75, auto, tree-auto)",
    )
    add("--prompts", type=int, default=None, help="prompts of each cell, at least one batch (default: 4)")
    add("--per-slot", type=int, default=1, help="prompts for each slot at least; 2 keeps the batch full for longer")
    add("--max-new-tokens", type=int, default=48, help="tokens an answer (default: %(default)s)")
    add("--rounds", type=int, default=3, help="timed repeats; three and more give intervals (default: %(default)s)")
    add(
        "--turns",
        choices=("step", "call"),
        default=None,
        help="whether our methods take turns step by step or call by call (default: step on a CPU, call on a GPU)",
    )
    add(
        "--draft-tokens", type=positive, default=(), help="lengths of drafts, such as 15,7 (default: the drafter's own)"
    )
    add("--temperature", type=floats, default=(0.0,), help="0 for greedy, such as 0,1 (default: 0)")
    add("--record", type=int, default=0, help="prompts of each set whose drafts are recorded, for replay and figures")
    add("--max-prompt-tokens", type=int, default=None, help="leave longer prompts out")
    add("--show", type=int, default=0, help="answers to print")
    add("--out", type=Path, default=None, help="JSON-lines file; a run whose file exists goes on where it stopped")
    parser.set_defaults(run=_bench)
    below = parser.add_subparsers(dest="below", metavar="report | replay")
    _add_report(below)
    _add_replay(below)


def _bench(options: argparse.Namespace) -> None:
    from hf_dcut.bench.methods import DEFAULT_METHODS
    from hf_dcut.bench.plan import Plan
    from hf_dcut.bench.runner import bench

    if options.quick and (options.batch or options.prompts):
        raise ValueError("--quick sets --batch and --prompts: leave them out")
    plan = Plan(
        target=options.target,
        drafter=options.drafter,
        assistant=options.assistant,
        data=options.data,
        batch_sizes=options.batch or (1, 4, 16, 32),
        methods=options.methods or DEFAULT_METHODS,
        prompts=4 if options.prompts is None else options.prompts,
        per_slot=options.per_slot,
        max_new_tokens=options.max_new_tokens,
        rounds=options.rounds,
        turns=options.turns,
        draft_tokens=options.draft_tokens,
        temperatures=options.temperature,
        record=options.record,
        max_prompt_tokens=options.max_prompt_tokens,
        show=options.show,
        dtype=options.dtype,
        out=options.out,
    )
    bench(plan)


def _add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("report", help="a run as one Markdown page with figures, beside the paper's numbers")
    parser.add_argument("file", type=Path, help="the run's JSON-lines file")
    parser.add_argument("--out", type=Path, required=True, help="folder for README.md and the figures")
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> None:
    from hf_dcut.bench.report import write_report

    print(write_report(options.file, options.out))


def _add_replay(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("replay", help="what methods would do with a run's recorded drafts on another machine")
    parser.add_argument("file", type=Path, help="the run's JSON-lines file, recorded with --record")
    parser.add_argument(
        "--costs", type=words, default=("h20", "h800"), help="h20, h800, measured; h20:4x has 4 times the compute"
    )
    parser.add_argument("--batch", type=positive, default=(32, 256), help="requests at once (default: 32,256)")
    parser.add_argument("--methods", type=words, default=None, help="as of bench")
    parser.add_argument("--fit", default=None, help="check instead: fit on one cell, DATA:B, and predict all others")
    parser.set_defaults(run=_replay)


def _replay(options: argparse.Namespace) -> None:
    from hf_dcut.bench.forecast import check_table, forecast_table
    from hf_dcut.bench.journal import Journal

    journal = Journal.read(options.file)
    if options.fit is not None:
        print(check_table(journal, options.fit))
        return
    print(forecast_table(journal, options.costs, options.batch, options.methods))


def words(text: str) -> tuple[str, ...]:
    """Returns the parts of a comma-separated list."""
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts):
        raise argparse.ArgumentTypeError(f"{text!r}: give names with commas between them")
    return parts


def positive(text: str) -> tuple[int, ...]:
    """Returns the positive integers of a comma-separated list."""
    numbers = tuple(int(part) for part in text.split(","))
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give positive integers, such as 1,4,16")
    return numbers


def floats(text: str) -> tuple[float, ...]:
    """Returns the numbers of a comma-separated list."""
    return tuple(float(part) for part in text.split(","))
