"""What a device can do at most, measured, and the least time a step can take by that.

A step drafts and then verifies, so its floor is the sum of the two, each bound by memory or by arithmetic, whichever
takes longer. Counted are weights read once, K/V read once, and the products of verified and drafted positions: what no
implementation can do without. The drafter's reading of committed tokens, logits and activations are left out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_dcut.bench.gpu.shapes import parameters
from hf_dcut.bench.kernel_check import device_seconds
from hf_dcut.drafters.dflash import DFlashDrafter

_REPEATS = 10


@dataclass(frozen=True)
class Work:
    """What something reads and computes.

    Attributes:
        bytes: weights and K/V.
        flops: of products; a multiplication and an addition are two.
    """

    bytes: float
    flops: float


@dataclass(frozen=True)
class Ceilings:
    """The device's best.

    Attributes:
        bytes_per_second: of a large copy, what is read and what is written both counted.
        flops_per_second: of a large square product in the dtype of the models.
    """

    bytes_per_second: float
    flops_per_second: float

    def floors(self, *phases: Work) -> dict[str, float]:
        """Returns the least seconds of phases one after the other: by memory alone, by arithmetic alone, and by both.

        Args:
            phases: what each does.
        """
        memory = [work.bytes / self.bytes_per_second for work in phases]
        arithmetic = [work.flops / self.flops_per_second for work in phases]
        return {
            "bandwidth_floor": sum(memory),
            "flop_floor": sum(arithmetic),
            "floor": sum(map(max, memory, arithmetic)),
        }

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers and where they come from, JSON-able."""
        return {**asdict(self), "source": "measured in this run: a large copy, a large square product"}


def measure_ceilings(device: torch.device, dtype: torch.dtype, size: int, side: int) -> Ceilings:
    """Returns the ceilings of a device.

    Args:
        device: which.
        dtype: of the product.
        size: bytes that are copied; several times what the device's caches hold.
        side: rows and columns of the matrices.
    """
    source = torch.ones(size, dtype=torch.uint8, device=device)
    copied = device_seconds(partial(torch.empty_like(source).copy_, source), device, _REPEATS)["p50"]
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    multiplied = device_seconds(partial(torch.mm, left, right), device, _REPEATS)["p50"]
    return Ceilings(2 * size / copied, 2 * side**3 / multiplied)


def verify_work(model: PreTrainedModel, rows: int, total: int, kv_length: int) -> Work:
    """Returns the work of verifying a packed row.

    Args:
        model: with a head of its own.
        rows: B requests.
        total: T positions.
        kv_length: cells of each request.
    """
    config = model.config
    weights = parameters(model, [model.get_input_embeddings().weight])
    cell = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    scores = 4 * total * kv_length * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    size = model.dtype.itemsize
    return Work(bytes=size * (weights + cell * rows * kv_length), flops=2 * total * weights + scores)


def draft_work(model: PreTrainedModel, drafter: DFlashDrafter, rows: int, kv_length: int) -> Work:
    """Returns the work of drafting a block for each of `rows` requests: the drafter's layers and the target's head."""
    config = drafter.config
    head = model.get_output_embeddings().weight.numel()
    layers = parameters(drafter.model, [drafter.model.fc.weight])
    cell = drafter.cell_bytes(model)
    scores = 4 * config.block_size * kv_length * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    products = 2 * (config.block_size * layers + config.draft_tokens * head)
    return Work(
        bytes=drafter.dtype.itemsize * layers + model.dtype.itemsize * head + cell * rows * kv_length,
        flops=rows * (products + scores),
    )
