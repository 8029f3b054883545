"""The command line of `hf-dcut run`: its arguments, what it tells the person who waits, and its exit codes."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from hf_dcut.jobs.plan import Plan
    from hf_dcut.jobs.runner import Outcome

DONE, REFUSED, INCOMPLETE, STOPPED, INTERRUPTED, TERMINATED = 0, 2, 3, 4, 130, 143
_OPTIONS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

_EPILOG = """\
input lines:
  {"id": "q1", "messages": [{"role": "user", "content": "What is 12 times 7?"}]}
  {"id": "q2", "prompt": "One, two,", "options": {"max_new_tokens": 8, "temperature": 0.7, "seed": 1}}

A job that was stopped, even by `kill -9`, goes on when the same command is given again: lines that have a result are
skipped. Under `accelerate launch` each process answers its share of the lines.

exit codes:
  0    every line has an answer
  2    nothing was generated: wrong arguments, input, model, or an output file of another run
  3    the job went through, but some lines were rejected or failed
  4    results could not be written any more, as on a full disk
  130  interrupted (143: terminated); finished results are written
  1    anything else, with a traceback: a fault of hf-dcut
"""


class Terminated(KeyboardInterrupt):
    """The process was asked to end (SIGTERM)."""


def add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command `run`; parsed options have its function under `run`, which returns the exit code."""
    parser = commands.add_parser(
        "run",
        help="answer a file of prompts, resumably",
        description="Answers the prompts of a JSON-lines file, many at once, and writes each result when it is there.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_files(parser.add_argument_group("files"))
    _add_models(parser.add_argument_group("models"))
    _add_generation(parser.add_argument_group("generation"))
    parser.set_defaults(run=_run)


def _add_files(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--input", required=True, metavar="FILE", help="prompts, one JSON object a line; - is stdin")
    group.add_argument("--output", required=True, metavar="FILE", help="results, one JSON object a line; - is stdout")
    group.add_argument("--rejects", type=Path, metavar="FILE", help="bad input lines (default: OUTPUT.rejects)")
    group.add_argument("--strict", action="store_true", help="stop before the first answer if an input line is bad")
    group.add_argument("--retry-errors", action="store_true", help="answer lines again whose result is an error")


def _add_models(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--target", required=True, metavar="ID", help="folder or Hub id of the model")
    group.add_argument(
        "--drafter",
        required=True,
        metavar="ID",
        help="folder or Hub id; lookup drafts from the text itself, suffix from all answers so far; several joined by "
        "+, such as ID+lookup+suffix; or none",
    )
    group.add_argument("--target-revision", metavar="REV", help="branch, tag or commit on the Hub")
    group.add_argument("--drafter-revision", metavar="REV", help="branch, tag or commit on the Hub")
    group.add_argument("--dtype", default="auto", help="of the target, such as bfloat16 (default: as saved)")
    group.add_argument("--budget", type=_budget, default="auto", help="auto, or a share in (0, 1] (default: auto)")
    group.add_argument("--max-batch-size", type=int, default=32, metavar="N", help="requests at once (default: 32)")
    group.add_argument(
        "--trust-remote-code", action="store_true", help="run code of the target's repository: only if you read it"
    )


def _add_generation(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-new-tokens", type=int, default=512, metavar="N", help="and the most a line may ask for (default: 512)"
    )
    group.add_argument(
        "--max-prompt-tokens", type=int, default=8192, metavar="N", help="longer prompts fail (default: 8192)"
    )
    group.add_argument("--temperature", type=float, metavar="X", help="0 is greedy (default: the model's own)")
    for name in _OPTIONS[1:]:
        kind = int if name == "top_k" else float
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="X", help="(default: the model's own)")
    group.add_argument("--seed", type=int, default=0, help="line n draws with SEED + n (default: 0)")
    group.add_argument("--thinking", action="store_true", help="let chat templates that know of it open a thought")
    group.add_argument("--token-ids", action="store_true", help="write the ids of the tokens too")


def _budget(text: str) -> float | str:
    try:
        return text if text == "auto" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give auto or a share in (0, 1]") from None


def _run(options: argparse.Namespace) -> int:
    from hf_dcut.jobs.journal import OutputError
    from hf_dcut.jobs.runner import run

    plan = _plan(options)
    # A result that is in a file need not be made again; what went to a pipe is not kept.
    resume = "" if plan.output == "-" else " The same command goes on from there."
    try:
        with _terminable():
            outcome = run(plan)
    except OutputError as error:
        _say(f"stopped: {error}. Results written before are whole.{resume}")
        return STOPPED
    except Terminated:
        _say(f"terminated; finished results are written.{resume}")
        return TERMINATED
    except KeyboardInterrupt:
        _say(f"interrupted; finished results are written.{resume}")
        return INTERRUPTED
    if not outcome.main:
        return DONE
    _say(summary(plan, outcome))
    return DONE if outcome.complete else INCOMPLETE


def _plan(options: argparse.Namespace) -> Plan:
    from dataclasses import fields

    from hf_dcut.jobs.plan import Plan

    given = vars(options)
    asked = {name: given[name] for name in _OPTIONS if given[name] is not None}
    names = {field.name for field in fields(Plan)} - {"options"}
    return Plan(**{name: given[name] for name in names}, options=asked)


def summary(plan: Plan, outcome: Outcome) -> str:
    """Returns how a job ended, in a few lines."""
    results = outcome.results
    answered = len(results.done) - results.failed
    reasons = ", ".join(f"{name} {count}" for name, count in sorted(results.reasons.items()))
    lines = [f"{answered} of {outcome.lines + outcome.rejected} lines answered" + (f" ({reasons})" if reasons else "")]
    if results.failed:
        lines.append(f"{results.failed} failed: their results hold 'error'; --retry-errors answers them again")
    if outcome.rejected:
        where = plan.rejects_path or "not kept; --rejects FILE keeps them"
        lines.append(f"{outcome.rejected} rejected: {where}")
    if outcome.tokens:
        speed = outcome.tokens / outcome.seconds
        accepted = f"{results.mean_accepted_tokens:.2f} a request and step"
        lines.append(f"{outcome.tokens} new tokens in {outcome.seconds:.1f} s: {speed:.1f} tokens/s, {accepted}")
    return "\n  ".join(lines)


def _say(text: str) -> None:
    print(f"hf-dcut run: {text}", file=sys.stderr)


@contextmanager
def _terminable() -> Iterator[None]:
    """Lets SIGTERM end the job as Ctrl-C does."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
