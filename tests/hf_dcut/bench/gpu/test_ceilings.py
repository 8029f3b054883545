"""Floors against sums done by hand."""

from __future__ import annotations

import pytest
import torch

from hf_dcut.bench.gpu.ceilings import Ceilings, Work, draft_work, measure_ceilings, verify_work
from hf_dcut.bench.gpu.shapes import SMALL, chain_model
from hf_dcut.drafters.dflash import DFlashDrafter

CPU = torch.device("cpu")
H, M, L, V = 128, 256, 4, 512
# Of a layer: q and o of 4 heads of 32, k and v of 2; gate, up, down; two norms, and those of q and k.
LAYER = 2 * H * 128 + 2 * H * 64 + 3 * H * M + 2 * H + 2 * 32


def test_a_floor_is_the_longer_of_memory_and_arithmetic_in_each_phase() -> None:
    limits = Ceilings(bytes_per_second=100.0, flops_per_second=10.0)
    floors = limits.floors(Work(bytes=500, flops=20), Work(bytes=100, flops=70))
    assert floors == {"bandwidth_floor": 6.0, "flop_floor": 9.0, "floor": 12.0}


def test_work_of_a_verified_row() -> None:
    model = chain_model(SMALL, CPU, torch.float32)
    work = verify_work(model, rows=2, total=6, kv_length=10)
    weights = L * LAYER + H + V * H
    assert work.bytes == 4 * (weights + L * 2 * 64 * 2 * 10)
    assert work.flops == 2 * 6 * weights + 6 * 10 * L * (2 * 128 + 2 * 128)


def test_work_of_a_draft() -> None:
    model = chain_model(SMALL, CPU, torch.float32)
    drafter = DFlashDrafter.random(model.config, taps=(0, 2), mask_token_id=2, block_size=4, layers=1)
    work = draft_work(model, drafter, rows=2, kv_length=10)
    norms = sum(p.numel() for n, p in drafter.model.named_parameters() if "layers" not in n and n != "fc.weight")
    weights = LAYER + norms
    assert norms <= 4 * H
    assert work.bytes == 4 * (weights + V * H + 2 * 64 * 2 * 10)
    assert work.flops == 2 * (2 * 4 * weights + 2 * 3 * V * H + 4 * 4 * 10 * 128)


def test_ceilings_are_measured() -> None:
    limits = measure_ceilings(CPU, torch.float32, size=1 << 20, side=64)
    assert limits.bytes_per_second > 1e6
    assert limits.flops_per_second > 1e6
    assert limits.to_dict()["source"].startswith("measured")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_faster_than_a_cpu() -> None:
    limits = measure_ceilings(torch.device("cuda"), torch.bfloat16, size=1 << 30, side=4096)
    assert limits.bytes_per_second > 1e11
    assert limits.flops_per_second > 1e12
