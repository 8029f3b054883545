"""`hf-dcut bench`: loads, warms up, compares at each batch size, prints a table each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_dcut.assembly import warmup
from hf_dcut.bench import report
from hf_dcut.bench.compare import DEFAULT_METHODS, Measured, compare, new_tokens
from hf_dcut.bench.prompts import encode, load_prompts
from hf_dcut.config import DCutConfig
from hf_dcut.drafters import AutoDrafter
from hf_dcut.drafters.base import Drafter
from hf_dcut.drafters.dflash import DFlashDrafter
from hf_dcut.drafters.oracle import OracleDrafter
from hf_dcut.drafters.prompt_lookup import PromptLookupDrafter
from hf_dcut.profiling import powers_of_two

# Confidences of the oracle's blocks: some are easy, some hard. Chosen so that a block of 15 drafts commits 4 tokens on
# average when all are verified.
ORACLE_PROFILE = (0.97, 0.86, 0.62, 0.35, 0.15)


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        target: folder or Hub id of the model.
        drafter: folder or Hub id of a drafter, or "oracle", "random" or "lookup".
        data: name of a shipped prompt set or a JSON-lines file.
        batch_sizes: requests at once; a table each.
        methods: as in `compare.options_of`.
        prompts: how many prompts; at least one batch.
        max_new_tokens: of each.
        rounds: timed repeats.
        show: answers to print.
        dtype: of the target.
        out: JSON file for the numbers; None writes none.
    """

    target: str
    drafter: str
    data: str = "gsm8k"
    batch_sizes: tuple[int, ...] = (1, 4, 16, 32)
    methods: tuple[str, ...] = DEFAULT_METHODS
    prompts: int = 4
    max_new_tokens: int = 48
    rounds: int = 3
    show: int = 0
    dtype: str = "auto"
    out: Path | None = None


def bench(plan: Plan) -> list[dict[str, Any]]:
    """Returns the numbers of every batch size after printing their tables."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(plan.target)
    model = AutoModelForCausalLM.from_pretrained(plan.target, dtype=plan.dtype).eval().to(device)
    cells = []
    for size in plan.batch_sizes:
        count = max(plan.prompts, size)
        prompts = load_prompts(plan.data, count)
        batches = [_move(encode(tokenizer, prompts[i : i + size]), model) for i in range(0, count, size)]
        measured = _compare(plan, model, batches, size)
        what = f"{count} prompts of {plan.data}, {plan.max_new_tokens} new tokens, {plan.rounds} rounds"
        print(f"\nB = {size}, {what}, drafter {plan.drafter}")
        print(report.table(measured), flush=True)
        if plan.show:
            _show(tokenizer, prompts, measured[-1], plan.show)
        cells.append({"batch_size": size, "prompts": count, "methods": report.as_dict(measured)})
    result = {"machine": report.machine(), "plan": {k: str(v) for k, v in vars(plan).items()}, "cells": cells}
    if plan.out is not None:
        plan.out.parent.mkdir(parents=True, exist_ok=True)
        plan.out.write_text(json.dumps(result, indent=1) + "\n")
    return cells


def _compare(plan: Plan, model: PreTrainedModel, batches: Sequence[dict[str, Tensor]], size: int) -> list[Measured]:
    """Returns the methods' measurements at one batch size."""
    drafter = make_drafter(plan.drafter, model, batches, plan.max_new_tokens)
    longest = max(batch["input_ids"].shape[1] for batch in batches) + plan.max_new_tokens
    config = DCutConfig(cost_table=warmup(model, drafter, powers_of_two(size), max_length=longest))
    total = plan.rounds * len({"generate", *plan.methods})
    with tqdm(total=total, desc=f"B = {size}", unit="run", disable=None) as bar:
        return compare(model, batches, plan.methods, drafter, config, plan.max_new_tokens, plan.rounds, bar.update)


def make_drafter(
    name: str, model: PreTrainedModel, batches: Sequence[dict[str, Tensor]], max_new_tokens: int
) -> Drafter:
    """Returns the drafter a plan names.

    Args:
        name: folder or Hub id, "oracle" (block 16, calibrated), "random" (an untrained DFlash) or "lookup".
        model: the target.
        batches: prompts; the oracle must know the target's answers to them.
        max_new_tokens: of each answer.
    """
    if name == "lookup":
        return PromptLookupDrafter()
    if name == "random":
        config = model.config.get_text_config(decoder=True)
        taps = sorted({1, config.num_hidden_layers // 2, config.num_hidden_layers - 3})
        drafter = DFlashDrafter.random(config, taps=taps, mask_token_id=0, block_size=8, layers=2, dtype=torch.bfloat16)
        return drafter.to(model.device)
    if name == "oracle":
        return OracleDrafter(_continuations(model, batches, max_new_tokens), draft_tokens=15, profile=ORACLE_PROFILE)
    return AutoDrafter.from_pretrained(name, device=model.device)


def _continuations(
    model: PreTrainedModel, batches: Sequence[dict[str, Tensor]], max_new_tokens: int
) -> dict[tuple[int, ...], list[int]]:
    """Returns what plain `generate` says to each prompt."""
    said: dict[tuple[int, ...], list[int]] = {}
    for batch in batches:
        rows = model.generate(**batch, max_new_tokens=max_new_tokens, do_sample=False)
        width = batch["input_ids"].shape[1]
        for ids, mask, tokens in zip(
            batch["input_ids"], batch["attention_mask"], new_tokens(rows[:, width:], model), strict=True
        ):
            said[tuple(ids[mask.bool()].tolist())] = tokens
    return said


def _show(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], measured: Measured, count: int) -> None:
    """Prints some prompts with the answers of the last method."""
    for prompt, tokens in list(zip(prompts, measured.sequences, strict=True))[:count]:
        print(f"\n> {prompt.splitlines()[0]}\n{tokenizer.decode(tokens, skip_special_tokens=True).strip()}")


def _move(batch: dict[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor.to(model.device) for name, tensor in batch.items()}
