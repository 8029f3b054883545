"""`hf-dcut bench | profile | train | evaluate | inspect | gpu-check`: the commands."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_dcut import __version__
from hf_dcut.evaluate_command import add_evaluate
from hf_dcut.train_command import add_train

_TARGET = "models/smollm2-135m-instruct"
_DRAFTER = "examples/drafter"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 when the command did its work, 1 when it found problems, 2 when it cannot do it."""
    parser = argparse.ArgumentParser(prog="hf-dcut", description="Batched speculative decoding for Transformers.")
    parser.add_argument("--version", action="version", version=f"hf-dcut {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (_add_bench, _add_profile, add_train, add_evaluate, _add_inspect, _add_gpu_check):
        add(commands)
    options = parser.parse_args(arguments)
    try:
        return options.run(options) or 0
    except (ValueError, TypeError, OSError, MemoryError) as error:
        print(f"hf-dcut {options.command}: {error}", file=sys.stderr)
        return 2


def _add_models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", default=_TARGET, help="folder or Hub id of the model (default: %(default)s)")
    parser.add_argument(
        "--drafter",
        default=_DRAFTER,
        help="folder or Hub id of a drafter, or oracle, random, lookup (default: %(default)s)",
    )
    parser.add_argument("--dtype", default="auto", help="of the model, such as bfloat16 (default: as saved)")


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("bench", help="compare methods side by side on real prompts")
    _add_models(parser)
    parser.add_argument("--quick", action="store_true", help="B = 1, 4, 16, 32 on a few prompts: minutes")
    parser.add_argument("--data", default="gsm8k", help="shipped prompt set or JSON-lines file (default: %(default)s)")
    parser.add_argument("--batch", type=_numbers, default=None, help="batch sizes, such as 1,4,16 (default: 1,4,16,32)")
    parser.add_argument("--methods", default=None, help="comma-separated: generate, plain, auto, or budgets in (0, 1]")
    parser.add_argument("--prompts", type=int, default=None, help="prompts, at least one batch (default: 4)")
    parser.add_argument("--max-new-tokens", type=int, default=48, help="tokens an answer (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="timed repeats (default: %(default)s)")
    parser.add_argument("--show", type=int, default=0, help="answers to print")
    parser.add_argument("--out", type=Path, default=None, help="JSON file for the numbers")
    parser.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> None:
    from hf_dcut.bench.compare import DEFAULT_METHODS
    from hf_dcut.bench.runner import Plan, bench

    if options.quick and (options.batch or options.prompts):
        raise ValueError("--quick sets --batch and --prompts: leave them out")
    methods = tuple(options.methods.split(",")) if options.methods else DEFAULT_METHODS
    plan = Plan(
        target=options.target,
        drafter=options.drafter,
        data=options.data,
        batch_sizes=options.batch or (1, 4, 16, 32),
        methods=methods,
        prompts=options.prompts or 4,
        max_new_tokens=options.max_new_tokens,
        rounds=options.rounds,
        show=options.show,
        dtype=options.dtype,
        out=options.out,
    )
    bench(plan)


def _add_profile(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("profile", help="measure the cost table ahead of time and print it")
    _add_models(parser)
    parser.add_argument(
        "--batch", type=_numbers, default=(1, 2, 4, 8, 16, 32), help="batch sizes (default: 1,2,4,8,16,32)"
    )
    parser.add_argument(
        "--max-length", type=int, default=512, help="tokens of the longest request (default: %(default)s)"
    )
    parser.add_argument("--cost-table", default="auto", help="file to keep it in (default: in the Hugging Face cache)")
    parser.set_defaults(run=_profile)


def _profile(options: argparse.Namespace) -> None:
    from transformers import AutoModelForCausalLM

    from hf_dcut.assembly import warmup
    from hf_dcut.bench.runner import make_drafter

    model = AutoModelForCausalLM.from_pretrained(options.target, dtype=options.dtype).eval()
    drafter = make_drafter(options.drafter, model, [], 0)
    table = warmup(model, drafter, options.batch, {"cost_table": options.cost_table}, options.max_length)
    print(table)
    print(f"kept in {table.path}")


def _add_inspect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("inspect", help="tell what a drafter is, and what is wrong with it (then status 1)")
    parser.add_argument("drafter", help="folder or Hub id")
    parser.add_argument("--target", default=None, help="folder or Hub id of the model it should fit")
    parser.add_argument("--revision", default=None, help="branch, tag or commit of the drafter's repository")
    parser.add_argument("--subfolder", default=None, help="where in the folder or repository the drafter lies")
    parser.set_defaults(run=_inspect)


def _inspect(options: argparse.Namespace) -> int:
    from hf_dcut.drafters.inspection import inspect

    found = inspect(options.drafter, options.target, revision=options.revision, subfolder=options.subfolder)
    print(found)
    return 1 if found.problems else 0


def _add_gpu_check(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("gpu-check", help="check a GPU: losslessness, the cost table, the attention path")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"), help="JSON file (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for any device")
    parser.set_defaults(run=_gpu_check)


def _gpu_check(options: argparse.Namespace) -> None:
    from hf_dcut.bench.gpu_check import gpu_check

    result = gpu_check(tiny=options.tiny)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def _numbers(text: str) -> tuple[int, ...]:
    """Returns the positive integers of a comma-separated list."""
    numbers = tuple(int(part) for part in text.split(","))
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give positive integers, such as 1,4,16")
    return numbers


if __name__ == "__main__":
    sys.exit(main())
