"""`hf-dcut evaluate`: its options."""

from __future__ import annotations

import argparse
from pathlib import Path

_TARGET = "models/smollm2-135m-instruct"
_DRAFTER = "examples/drafter"


def add_evaluate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the parser of `hf-dcut`."""
    parser = commands.add_parser(
        "evaluate", help="how many drafts a target accepts, and whether confidence tells which"
    )
    parser.add_argument("--target", default=_TARGET, help="folder or Hub id of the model (default: %(default)s)")
    parser.add_argument(
        "--drafter",
        action="append",
        help=f"folder or Hub id of a drafter, with +lookup behind it for prompt lookup too, once for each (default: "
        f"{_DRAFTER}); prompt lookup comes for comparison",
    )
    parser.add_argument(
        "--data", action="append", help="shipped prompt set or JSON-lines file, once for each (default: gsm8k)"
    )
    parser.add_argument("--prompts", type=int, default=32, help="the first so many of each set (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="tokens an answer (default: %(default)s)")
    parser.add_argument("--keep-loops", action="store_true", help="count text that repeats itself too")
    parser.add_argument("--slots", type=int, default=32, help="answers at once (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="of the target, such as bfloat16 (default: as saved)")
    parser.add_argument(
        "--answers", type=Path, default=None, help="folder that keeps the target's answers for next time"
    )
    parser.add_argument("--out", type=Path, default=None, help="JSON file for the numbers")
    parser.add_argument("--plot", type=Path, default=None, help="image file for the reliability curves (matplotlib)")
    parser.set_defaults(run=_evaluate)


def _evaluate(options: argparse.Namespace) -> None:
    from hf_dcut.bench.evaluate import Plan, evaluate

    for name in ("prompts", "max_new_tokens", "slots"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name)}: give a positive integer")
    values = {k: v for k, v in vars(options).items() if k not in ("command", "run", "drafter", "data")}
    drafters, data = tuple(options.drafter or [_DRAFTER]), tuple(options.data or ["gsm8k"])
    evaluate(Plan(drafters=drafters, data=data, **values))
