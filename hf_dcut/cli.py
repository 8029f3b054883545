"""`hf-dcut run | bench | profile | train | evaluate | inspect | gpu-check | demo`: the commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_dcut import __version__
from hf_dcut.app.command import add_demo
from hf_dcut.bench.command import add_bench, add_models, positive, words
from hf_dcut.evaluate_command import add_evaluate
from hf_dcut.jobs.command import add_run
from hf_dcut.train_command import add_train


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 when the command did its work, 1 when it found problems, 2 when it cannot do it.

    `run` has more of them, which its help tells.
    """
    options = parser().parse_args(arguments)
    try:
        return options.run(options) or 0
    except (ValueError, TypeError, OSError, MemoryError, ImportError) as error:
        print(f"hf-dcut {options.command}: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands; what it parses has the command's function under `run`."""
    made = argparse.ArgumentParser(prog="hf-dcut", description="Batched speculative decoding for Transformers.")
    made.add_argument("--version", action="version", version=f"hf-dcut {__version__}")
    commands = made.add_subparsers(dest="command", required=True)
    own = (_add_profile, _add_inspect, _add_gpu_check)
    for add in (add_run, add_bench, add_train, add_evaluate, add_demo, *own):
        add(commands)
    return made


def _add_profile(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("profile", help="measure the cost table ahead of time and print it")
    add_models(parser)
    parser.add_argument(
        "--batch", type=positive, default=(1, 2, 4, 8, 16, 32), help="batch sizes (default: 1,2,4,8,16,32)"
    )
    parser.add_argument(
        "--max-length", type=int, default=512, help="tokens of the longest request (default: %(default)s)"
    )
    parser.add_argument("--cost-table", default="auto", help="file to keep it in (default: in the Hugging Face cache)")
    parser.set_defaults(run=_profile)


def _profile(options: argparse.Namespace) -> None:
    from transformers import AutoModelForCausalLM

    from hf_dcut.assembly import warmup
    from hf_dcut.bench.drafter import make_drafter

    model = AutoModelForCausalLM.from_pretrained(options.target, dtype=options.dtype).eval()
    drafter = make_drafter(options.drafter, model)
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
    parser = commands.add_parser("gpu-check", help="check a GPU: kernels, losslessness, costs of steps, speed")
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        default=Path("gpu_check.json"),
        help="JSON file; a page goes beside it (default: %(default)s)",
    )
    add("--tiny", action="store_true", help="small shapes, for any device")
    add("--minutes", type=float, default=8.0, help="for everything; what no longer fits is left out (default: 8)")
    add("--parts", type=words, default=None, help="some of its parts, such as kernels,costs (default: all)")
    add("--commit", default=None, help="of the sources, where git does not tell it")
    parser.set_defaults(run=_gpu_check)


def _gpu_check(options: argparse.Namespace) -> int:
    from hf_dcut.bench.gpu_check import NAMES, gpu_check

    result = gpu_check(options.out, options.tiny, options.minutes, options.parts or NAMES, options.commit)
    print(options.out.with_suffix(".md").read_text())
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
