"""A file of prompts answered by any number of GPUs on any number of machines, through Ray Data.

    pip install "hf-dcut[ray]"
    python examples/ray_batch.py prompts.jsonl answers/ --target ID --drafter ID --replicas 8

Each line of the input is {"id": .., "prompt": ..}; each line under answers/ has the id, the text and how the request
ended. `--replicas` is the one number to scale by: so many actors, each with a target, a drafter and a cost table of its
own. Ray finds the GPUs: of this machine, or of the cluster that `ray start` made (`--address auto`), whose machines all
see the same output path.

The same command goes on where it was stopped: what has an answer under answers/ is left out. A line draws with a seed
made of its id, so its text depends neither on the number of replicas nor on the stops.
"""

from __future__ import annotations

import argparse
import json
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_dcut

Columns = dict[str, Any]


class Answerer:
    """One replica: a target, a drafter and what steps cost where it runs.

    Args:
        target, drafter: folders or Hub ids; the drafter "lookup" copies from the text, "NAME+lookup" does both.
        options: of `generate_batch`.
    """

    def __init__(self, target: str, drafter: str, options: dict[str, Any]):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tokenizer = AutoTokenizer.from_pretrained(target)
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype="auto").to(device).eval()
        self.drafter = hf_dcut.AutoDrafter.named(drafter, device=device, dtype=self.model.dtype)
        self.options = options

    def __call__(self, rows: Columns) -> Columns:
        """Returns the answers to some lines; one that fails has an error in place of a text."""
        requests = [
            hf_dcut.BatchRequest(self.tokenizer(str(prompt)).input_ids, seed=zlib.crc32(str(name).encode()))
            for name, prompt in zip(rows["id"], rows["prompt"], strict=True)
        ]
        results = hf_dcut.generate_batch(
            self.model, requests, assistant_model=self.drafter, raise_errors=False, progress_bar=False, **self.options
        ).values()
        texts = [self.tokenizer.decode(result.generated_tokens, skip_special_tokens=True) for result in results]
        ends = [result.finish_reason for result in results]
        return {"id": rows["id"], "text": texts, "finish_reason": ends, "error": [r.error or "" for r in results]}


def read(file: Path) -> list[dict[str, Any]]:
    """Returns the lines of a file of JSON lines, their ids as text.

    Raises:
        ValueError: one is no JSON with an id.
    """
    lines = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            values = json.loads(line)
            lines.append({**values, "id": str(values["id"])})
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{file}:{number} is no JSON object with an id ({error!r}). A file of answers that was cut off can be "
                "deleted: its lines are answered again"
            ) from error
    return lines


def answered(folder: Path) -> set[str]:
    """Returns the ids that have an answer in the files of a folder."""
    return {line["id"] for file in folder.glob("*.json") for line in read(file)}


def answer(source: Path, folder: Path, replicas: int, gpus: float, lines: int, **replica: Any) -> int:
    """Answers the lines of a file that have no answer yet; returns how many those were.

    Args:
        source: JSON lines with "id" and "prompt".
        folder: where the answers go, a file for every so many lines.
        replicas: actors.
        gpus: of each of them.
        lines: that an actor is given at once, and loses if it is stopped.
        replica: arguments of `Answerer`.
    """
    done = answered(folder)
    left = [{"id": line["id"], "prompt": line["prompt"]} for line in read(source) if line["id"] not in done]
    if left:
        ray.data.from_items(left, override_num_blocks=math.ceil(len(left) / lines)).map_batches(
            Answerer,
            fn_constructor_kwargs=replica,
            batch_size=None,  # a block at a time
            compute=ray.data.ActorPoolStrategy(size=replicas),
            num_gpus=gpus,
        ).write_json(str(folder), mode="append")
    return len(left)


def main(arguments: Sequence[str] | None = None) -> None:
    """Answers a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", default="lookup")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--gpus", type=float, default=float(torch.cuda.is_available()), help="of each replica")
    parser.add_argument("--lines", type=int, default=1024, help="that a replica is given at once")
    parser.add_argument("--slots", type=int, default=64, help="requests that a replica runs at once")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--dcut", default="auto")
    parser.add_argument("--address", help="of a Ray cluster; a Ray of this machine's own without it")
    options = parser.parse_args(arguments)

    ray.init(address=options.address, include_dashboard=False, log_to_driver=False)
    job = {
        "dcut": options.dcut if options.dcut in ("auto", "none") else float(options.dcut),
        "max_batch_size": options.slots,
        "max_new_tokens": options.max_new_tokens,
    }
    replica = {"target": options.target, "drafter": options.drafter, "options": job}
    count = answer(options.input, options.output, options.replicas, options.gpus, options.lines, **replica)
    print(f"{count} lines answered, {len(answered(options.output))} in all under {options.output}")


if __name__ == "__main__":
    main()
