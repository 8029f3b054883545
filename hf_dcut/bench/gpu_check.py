"""`hf-dcut gpu-check`: what a GPU must show, in a few minutes and without network.

    lossless   tiny random models on the device, in float32 and bfloat16, against plain `generate`
    costs      the paper's table 3: a Qwen3-8B-shaped random model with a five-layer DFlash drafter, D = 15
    attention  which path packed attention took
    kernels    every kernel against its reference on the device, and its seconds against what it replaces
    selection  seconds of scores, budget and packing, and their share of a step

`tiny=True` runs the same code in small shapes on any device.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from hf_dcut.assembly import warmup
from hf_dcut.attention import path_name
from hf_dcut.bench.kernel_check import check_kernels, host_seconds, taken_paths, time_kernels
from hf_dcut.bench.lossless import TIE, margin
from hf_dcut.bench.machine import machine
from hf_dcut.config import PAPER_RATIOS, DCutConfig
from hf_dcut.cost_table import CostTable
from hf_dcut.drafters.dflash import DFlashDrafter
from hf_dcut.selecting import select
from hf_dcut.types import Batch, Drafts

_SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
_SMALL |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "initializer_range": 0.2}
_QWEN3_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}
_QWEN3_8B |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}


def gpu_check(tiny: bool = False) -> dict[str, Any]:
    """Returns the results, JSON-able.

    Args:
        tiny: small shapes; else a CUDA device is needed.

    Raises:
        ValueError: no CUDA device, unless `tiny`.
    """
    if not tiny and not torch.cuda.is_available():
        raise ValueError("gpu-check needs a CUDA device: run it on one, or pass --tiny to try it in small shapes")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    begin = time.perf_counter()
    lossless = [
        _lossless(model_class, config, dtype, device, batch=4 if tiny else 16, new=12 if tiny else 64)
        for model_class, config in ((LlamaForCausalLM, LlamaConfig), (Qwen3ForCausalLM, Qwen3Config))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    costs, table = _costs(device, tiny)
    checks = check_kernels(device, tiny)
    return {
        "machine": machine(),
        "tiny": tiny,
        "attention": costs["attention"],
        "paths": taken_paths(device),
        "passed": all(entry["passed"] for entry in [*lossless, *checks]),
        "lossless": lossless,
        "costs": costs,
        "kernels": {"checks": checks, "times": time_kernels(device, tiny)},
        "selection": _selection(table, device),
        "seconds": time.perf_counter() - begin,
    }


def _lossless(
    model_class: type[PreTrainedModel],
    config_class: type,
    dtype: torch.dtype,
    device: torch.device,
    batch: int,
    new: int,
) -> dict[str, Any]:
    """Returns how many rows of each budget equal plain `generate`, and the largest margin where one does not."""
    torch.manual_seed(0)
    config = config_class(**_SMALL, eos_token_id=None, bos_token_id=1, pad_token_id=0)
    model = model_class(config).eval().to(device, dtype)
    drafter = DFlashDrafter.random(config, taps=(0, 2), mask_token_id=2, block_size=8, layers=1, dtype=dtype).to(device)
    lengths = torch.arange(batch) % 7 + 3
    width = int(lengths.max())
    mask = (torch.arange(width) >= width - lengths[:, None]).long()
    ids = torch.randint(3, config.vocab_size, (batch, width), generator=torch.Generator().manual_seed(1)) * mask
    inputs = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
    plain = model.generate(**inputs, max_new_tokens=new, do_sample=False)[:, width:].tolist()
    equal, margins = {}, []
    for budget in ("none", 1.0, 0.5, 0.25):
        rows = model.generate(**inputs, max_new_tokens=new, do_sample=False, assistant_model=drafter, dcut=budget)
        ours = rows[:, width:].tolist()
        prompts = [ids[i, mask[i].bool()].tolist() for i in range(batch)]
        found = [margin(model, p, a, b) for p, a, b in zip(prompts, ours, plain, strict=True)]
        margins += [m for m in found if m is not None]
        equal[str(budget)] = sum(m is None for m in found)
    worst = max(margins, default=0.0)
    return {
        "model": model_class.__name__,
        "dtype": str(dtype),
        "rows": batch,
        "equal_rows": equal,
        "largest_margin_at_a_difference": worst,
        "passed": worst < TIE[dtype],
    }


def _costs(device: torch.device, tiny: bool) -> tuple[dict[str, Any], CostTable]:
    """Returns seconds of plain and packed steps, {B: {T: seconds}} with T = 0 for the plain step, and their table."""
    shape, sizes, block, layers = (_SMALL, (1, 2), 4, 1) if tiny else (_QWEN3_8B, (1, 8, 16, 32, 64), 16, 5)
    config = Qwen3Config(**{**shape, "initializer_range": 0.02})
    with torch.device(device):
        model = Qwen3ForCausalLM._from_config(config, dtype=torch.float32 if tiny else torch.bfloat16).eval()
    depth = config.num_hidden_layers
    taps = (0, depth - 3) if tiny else (1, 9, 17, 25, 33)
    dtype = model.dtype
    drafter = DFlashDrafter.random(config, taps=taps, mask_token_id=2, block_size=block, layers=layers, dtype=dtype).to(
        device
    )
    table = warmup(model, drafter, sizes, DCutConfig(cost_table="off"), max_length=64 if tiny else 2048)
    found = {
        "shape": shape,
        "attention": path_name(device, dtype, [(config.head_dim, config.head_dim)]),
        "draft_tokens": block - 1,
        "dtype": str(dtype),
        "seconds": {
            str(kv): {str(b): {str(t): s for t, s in row.items()} for b, row in rows.items()}
            for kv, rows in table.seconds.items()
        },
    }
    return found, table


def _selection(table: CostTable, device: torch.device) -> dict[str, dict[str, float]]:
    """Returns seconds of a selection by batch size, host read included, and its share of the step of all positions."""
    found, depth = {}, table.draft_tokens
    (by_batch,) = table.seconds.values()
    for rows in by_batch:
        confidence = torch.rand(rows, depth, generator=torch.Generator().manual_seed(0)).sqrt().to(device)
        drafts = Drafts.chain(torch.ones(rows, depth, dtype=torch.int64, device=device), confidence)
        slot, full = torch.arange(rows, device=device), torch.full((rows,), depth, device=device)
        batch = Batch(slot, full, full, full, slot, slot * 0)
        seconds = host_seconds(partial(select, drafts, batch, PAPER_RATIOS, table, 2 * depth), device)
        whole = table.drafted(rows, rows * (depth + 1))
        found[str(rows)] = {**seconds, "share_p50": seconds["p50"] / whole, "share_p95": seconds["p95"] / whole}
    return found
