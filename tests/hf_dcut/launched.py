"""What `test_ranks.py` and `test_parallel.py` run in several processes: `launched.py SCENARIO MODEL OUT`.

Each process writes what it got to OUT/SCENARIO-<rank>.json. Global seeds and clocks differ between them on purpose.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import distributed
from transformers import AutoModelForCausalLM, PreTrainedModel, StoppingCriteria
from transformers.distributed import DistributedConfig

import hf_dcut
from hf_dcut import BatchRequest, DCutConfig, OracleDrafter, PromptLookupDrafter
from hf_dcut.assembly import open_engine
from hf_dcut.drafters.dflash import DFlashDrafter
from hf_dcut.parallel import Replicas

RANK, SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
LENGTHS = (3, 9, 5, 1, 12)
NEW = 200


def load(folder: str, tensor_parallel: int = SIZE) -> PreTrainedModel:
    """Returns the model, split over so many processes."""
    split = {"distributed_config": DistributedConfig(tp_size=tensor_parallel)} if tensor_parallel > 1 else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **split).eval()


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    return [[3 + (7 * i + 5 * n) % 90 for i in range(n)] for n in lengths]


def padded() -> dict[str, torch.Tensor]:
    width = max(LENGTHS)
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts()])
    return {"input_ids": ids, "attention_mask": (torch.arange(width) >= width - torch.tensor(LENGTHS)[:, None]).long()}


def texts(model: PreTrainedModel, drafter: Any, dcut: Any, count: int = 24, **options: Any) -> list[list[int]]:
    options = {"do_sample": False, "max_new_tokens": count} | options
    out = model.generate(**padded(), assistant_model=drafter, dcut=dcut, return_dict_in_generate=True, **options)
    assert "max_time" in options or any(sum(record.drafted) for record in out.stats.records)
    return out.sequences[:, max(LENGTHS) :].tolist()


class Coin(StoppingCriteria):
    """Ends a request by chance, another in each process."""

    def __init__(self) -> None:
        self.random = random.Random(RANK)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **others: Any) -> torch.Tensor:
        return torch.tensor([self.random.random() < 0.3] * len(input_ids))


def refusal(call: Callable[[], Any]) -> str:
    """Returns the message of the ValueError that a call must end in."""
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError("not refused")


def together(folder: str, out: Path) -> dict[str, Any]:
    """What one process and several must answer alike, and what only the several."""
    if SIZE > 1 and "qwen3" in folder:
        Accelerator(cpu=True)
    model = load(folder)
    plain = model.generate(**padded(), max_new_tokens=NEW, do_sample=False)[:, max(LENGTHS) :].tolist()
    said = {tuple(prompt): row for prompt, row in zip(prompts(), plain, strict=True)}
    oracle, lookup = OracleDrafter(said, 5, (0.3, 0.9, 1.0)), PromptLookupDrafter(3)
    # Borrows the target's embeddings and head.
    dflash = DFlashDrafter.random(
        model.config, taps=(0, 1), mask_token_id=3, block_size=3, layers=1, dtype=torch.float64
    )
    raw = DFlashDrafter(copy.deepcopy(dflash.model))
    raw.model.config = replace(raw.model.config, input_embedding_scale=1.0)
    rows = {b: {0: 1.0, b: 1.2, 3 * b: 1.3, 6 * b: 1.0 + b / 4} for b in (1, 2, 4)}
    table = {"cost_table": hf_dcut.CostTable.from_rows(rows, 5), "ratios": (0.5, 1.0), "deterministic": True}
    measured = {"cost_table": str(out / f"costs-{RANK}.json"), "ratios": (1.0,)}
    sampling = {"do_sample": True, "temperature": 0.9, "top_k": 20, "seed": 5}
    job = {"max_batch_size": 3, "do_sample": True, "top_k": 10, "max_new_tokens": 20, "progress_bar": False}

    def batch(**options: Any) -> list[list[int]]:
        given = [BatchRequest(p, priority=i % 3, seed=11 if i == 2 else None) for i, p in enumerate(prompts())]
        results = hf_dcut.generate_batch(model, given, assistant_model=oracle, dcut=0.5, **job, **options)
        return [result.generated_tokens for result in results.values()]

    def even(row: int, ids: torch.Tensor) -> list[int]:
        return list(range(4, 101, 2))

    equal = {
        "oracle": texts(model, oracle, table, NEW),
        "dflash": texts(model, dflash, measured),
        "raw rows": texts(model, raw, 0.5),
        "lookup": texts(model, lookup, 0.5),
        "sampled": texts(model, oracle, table, NEW, **sampling),
        "drawn": texts(model, dflash, DCutConfig(budget=0.5, proposals="sampled"), **sampling),
        "walked": texts(model, oracle, 0.5, 12, prefix_allowed_tokens_fn=even),
        "batch": batch(seed=3),
    }
    assert equal["oracle"] == plain
    # Without a seed, with a clock or a coin, only the processes among themselves are equal.
    own: dict[str, Any] = {
        "sampled": texts(model, oracle, 0.5, do_sample=True),
        "tossed": texts(model, oracle, 0.5, stopping_criteria=[Coin()]),
        "timed": texts(model, oracle, 0.5, NEW, max_time=1.0),
        "batch": batch(),
    }
    with open_engine(model, dflash, DCutConfig.of(measured), 4, 12, 36) as engine:
        assert engine.costs is not None
        heads = [layer.keys.shape[2] for layer in engine.cache.layers]
        own |= {"heads": heads, "seconds": str(engine.costs.seconds)}
        own["processes"] = engine.costs.fingerprint["tensor_parallel"]
        own["written"] = [(out / f"costs-{rank}.json").exists() for rank in range(2)]
    if SIZE > 1:
        own["refused"] = refusals(model, lookup)
    return {"equal": equal, "own": own}


def refusals(model: PreTrainedModel, drafter: Any) -> dict[str, str]:
    """What is told when the processes are given different things."""
    from importlib import metadata

    def call(dcut: Any = 0.5, shift: int = 0, **options: Any) -> Any:
        options |= {"max_new_tokens": 4, "do_sample": False}
        return model.generate(torch.tensor([[5, 6, 7 + shift]]), assistant_model=drafter, dcut=dcut, **options)

    table = hf_dcut.CostTable.from_rows({1: {0: 1.0, 1: 1.0, 4: 1.0 + RANK}}, 3)
    found = {
        "prompts": refusal(lambda: call(shift=RANK)),
        "budget": refusal(lambda: call(dcut=0.5 + 0.25 * RANK)),
        "tables": refusal(lambda: call(dcut={"cost_table": table})),
        "options": refusal(lambda: call(min_new_tokens=1 + RANK)),
        "inputs": refusal(lambda: hf_dcut.generate_batch(model, [[5], [6 + RANK]], assistant_model=drafter, dcut=0.5)),
        "manager": refusal(lambda: hf_dcut.BatchManager(model, max_length=9, assistant_model=drafter)),
    }
    version = metadata.version
    metadata.version = lambda name: f"{RANK}" if name == "hf-dcut" else version(name)
    found["versions"] = refusal(call)
    metadata.version = version
    call()  # nothing of all this is left behind
    group = distributed.is_initialized
    distributed.is_initialized = lambda: False
    found["group"] = refusal(call)
    distributed.is_initialized = group
    return found


def uneven(folder: str, out: Path) -> dict[str, Any]:
    """A model whose heads cannot be split."""
    model = load(folder)
    return {"refused": refusal(lambda: model.generate(torch.tensor([[5]]), prompt_lookup_num_tokens=3, dcut=0.5))}


def replicas(folder: str, out: Path, tensor_parallel: int = 1) -> dict[str, Any]:
    """A batch job whose inputs are shared by replicas."""
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == SIZE
    model = load_replica(folder, tensor_parallel) if tensor_parallel > 1 else load(folder, 1)
    requests = prompts((*LENGTHS, 7, 2))
    job = {"assistant_model": PromptLookupDrafter(3), "dcut": 0.5, "max_batch_size": 2, "max_new_tokens": 20}
    run = {**job, "do_sample": True, "progress_bar": False, "accelerator": accelerator}

    def answers(given: list[Any], **options: Any) -> dict[str, list[int]]:
        return {k: r.generated_tokens for k, r in hf_dcut.generate_batch(model, given, **run | options).items()}

    failing = hf_dcut.generate_batch(model, [[5], [6], [900], [7]], **run, raise_errors=False)
    return {
        "seeded": answers(requests, seed=4),
        "several": answers(requests[:3], seed=4, num_return_sequences=2),
        "unseeded": answers(requests),
        "one": answers(requests[:1], seed=4),
        "share": Replicas(model, accelerator).share(range(7)),
        "failing": {name: result.error for name, result in failing.items()},
    }


def grid(folder: str, out: Path) -> dict[str, Any]:
    """Replicas that are two processes each."""
    return replicas(folder, out, 2)


def load_replica(folder: str, tensor_parallel: int) -> PreTrainedModel:
    """Returns a model in a mesh of replicas by tensor parallelism."""
    config = DistributedConfig(tp_size=tensor_parallel, dp_replicate_size=SIZE // tensor_parallel)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, distributed_config=config).eval()


def broken(folder: str, out: Path, fault: Callable[[], None]) -> dict[str, Any]:
    """The second process breaks off after some steps; the first must end by itself."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{out}/store", rank=RANK, world_size=SIZE, timeout=timedelta(seconds=6)
    )
    model, steps, begin = load(folder), 0, 0.0

    def count(*_: Any) -> None:
        nonlocal steps, begin
        steps += 1
        if steps == 20:
            begin = time.perf_counter()
            if RANK == 1:
                fault()

    model.register_forward_pre_hook(count)
    try:
        texts(model, PromptLookupDrafter(3), 0.5)
    except RuntimeError as error:
        return {"error": str(error), "seconds": time.perf_counter() - begin}
    raise AssertionError("went on alone")


def dies(folder: str, out: Path) -> dict[str, Any]:
    return broken(folder, out, lambda: os._exit(3))


def stalls(folder: str, out: Path) -> dict[str, Any]:
    return broken(folder, out, lambda: time.sleep(60))


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    torch.manual_seed(1000 + RANK)
    torch.set_num_threads(1)
    scenario, model_folder, place = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    found = globals()[scenario](model_folder, place)
    Path(place, f"{scenario}-{SIZE}-{RANK}.json").write_text(json.dumps(found))
    os._exit(0)
