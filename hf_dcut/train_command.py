"""`hf-dcut train`: its options."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import fields
from pathlib import Path

from hf_dcut.wording import counted

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def add_train(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the parser of `hf-dcut`."""
    parser = commands.add_parser("train", help="train a DFlash drafter for a model")
    parser.add_argument("--target", required=True, help="folder or Hub id of the model to draft for")
    parser.add_argument("--out", type=Path, required=True, help="folder for the drafter")
    _add_data(parser)
    _add_shape(parser)
    _add_recipe(parser)
    parser.add_argument("--time-budget", type=_seconds, help="stop in time and save, such as 90s, 8m or 2h")
    parser.add_argument("--work", type=Path, help="folder for answers, taps and state (default: work in --out)")
    parser.add_argument("--resume", action="store_true", help="go on with the run in the work folder")
    parser.add_argument("--dtype", default="auto", help="of the target, such as bfloat16 (default: as saved)")
    parser.set_defaults(run=_train)


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to learn from")
    group.add_argument("--prompts", help="JSON-lines file or shipped prompt set that the target answers")
    group.add_argument("--answers", type=Path, action="append", help="file of answers made before, once for each")
    group.add_argument("--max-new-tokens", type=int, help="tokens of an answer (default: 256)")
    group.add_argument("--max-prompt-tokens", type=int, help="longer prompts are left out (default: 512)")
    group.add_argument("--slots", type=int, help="answers in work at once (default: 32)")
    group.add_argument("--held-out", type=float, help="share of answers that is measured on (default: 0.02)")
    group.add_argument("--keep-loops", action="store_true", help="learn from text that repeats itself too")


def _add_shape(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the drafter")
    group.add_argument("--start", help="random, target (copies of its last layers), or a drafter (default: random)")
    group.add_argument("--layers", type=int, help="layers (default: 5)")
    group.add_argument("--block-size", type=int, help="the anchor and the drafts after it (default: 16, or --start's)")
    group.add_argument("--taps", type=_layer_ids, help="target layers to read, such as 1,8,14 (default: five, spread)")
    group.add_argument("--mask-token-id", type=int, help="token that text never holds (default: a free special token)")
    group.add_argument("--draft-vocab-size", type=int, help="draft only the most frequent tokens (default: all)")


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--steps", type=int, help="optimizer steps (default: 1000, or the time budget)")
    group.add_argument("--batch", type=int, help="answers of a step, over all processes (default: 8)")
    group.add_argument("--anchors", type=int, help="blocks of an answer in a step (default: 32)")
    group.add_argument("--learning-rate", type=float, help="its peak (default: 6e-4)")
    group.add_argument(
        "--decay", type=float, help="places after which a draft's weight is 1/e (default: half the block)"
    )
    group.add_argument("--soft", type=float, help="share learned from the target's probabilities (default: 0)")
    group.add_argument("--precision", choices=("bf16", "no"), help="of matrix products (default: bf16)")
    group.add_argument("--seed", type=int, help="of weights and order (default: 0)")
    group.add_argument("--save-every", type=int, help="steps between saved states (default: 100)")
    group.add_argument("--evaluate-every", type=int, help="steps between evaluations (default: 200)")


def _train(options: argparse.Namespace) -> None:
    from hf_dcut.drafters.training.recipe import Recipe
    from hf_dcut.training import TrainPlan, train

    given = {k: v for k, v in vars(options).items() if v is not None}
    recipe = {f.name: given[f.name] for f in fields(Recipe) if f.name in given}
    if "time_budget" in given:
        recipe.setdefault("steps", None)
    plan = {f.name: given[f.name] for f in fields(TrainPlan) if f.name in given and f.name != "command"}
    plan["answers"] = tuple(given.get("answers", ()))
    result = train(TrainPlan(recipe=Recipe(**recipe), command=shlex.join(["hf-dcut", *sys.argv[1:]]), **plan))
    tokens = result.get("tokens_per_step")
    measured = "nothing was held out" if tokens is None else f"{tokens:.2f} tokens a step on held-out answers"
    print(f"{options.out}: {counted(result['steps'], 'step')} in {result['seconds']:.0f} s, {measured}")


def _seconds(text: str) -> float:
    """Returns the seconds that "90", "90s", "8m" or "2h" stand for."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "s")
    try:
        value = float(number) * _UNITS[unit]
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: give a time such as 90s, 8m or 2h")
    return value


def _layer_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give layers of the target, such as 1,8,14") from None
