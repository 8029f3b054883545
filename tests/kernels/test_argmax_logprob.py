"""The likeliest token and its log-probability: the twins against float64, ties, tails, and what is not a number."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_dcut.kernels import argmax_logprob

# A float32 sum of exponentials of up to 10 000 logits, in any order, and its logarithm.
ROUNDING = 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 7), (2, 3, 4097), (1, 1), (5, 10_000), (2, 4096), (0, 5)])
@pytest.mark.parametrize("path", ["reference", "triton"])
def test_equals_float64(
    path: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, poisoned_memory: None
) -> None:
    logits = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    index, logprob = argmax_logprob(logits.to(device), path=path)
    assert (index.dtype, logprob.dtype) == (torch.int64, torch.float32)
    assert index.shape == logprob.shape == shape[:-1]
    expected = logits.double().log_softmax(-1)
    assert torch.equal(logits.float().argmax(-1), index.cpu())
    assert torch.allclose(logprob.cpu().double(), expected.amax(-1), rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_the_first_of_equal_logits(path: str, device: torch.device) -> None:
    logits = torch.zeros(4, 9000)
    for row, places in enumerate([(0, 8999), (4095, 4096), (5000, 5001, 8191), (8999,)]):
        logits[row, list(places)] = 3.0
    index, logprob = argmax_logprob(logits.to(device), path=path)
    assert index.tolist() == [0, 4095, 5000, 8999]
    assert logprob[3].item() == pytest.approx(-math.log1p(8999 * math.exp(-3)), abs=ROUNDING)


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_what_is_no_distribution_is_nan(path: str, device: torch.device) -> None:
    logits = torch.zeros(5, 5000)
    logits[0, 7], logits[1, 4999], logits[2] = math.nan, math.inf, -math.inf
    logits[3, :4999] = -math.inf  # one token alone
    index, logprob = argmax_logprob(logits.to(device), path=path)
    assert logprob[:3].isnan().all()
    assert (index[3].item(), logprob[3].item()) == (4999, 0.0)
    assert index[1].item() == 4999
    assert ((index >= 0) & (index < 5000)).all()


def test_strided_rows(device: torch.device) -> None:
    logits = torch.randn(4, 3, 50, generator=torch.Generator().manual_seed(0))
    for view in (logits[:, 1:], logits[..., 5:20], logits.transpose(0, 2)):
        found, expected = argmax_logprob(view.to(device), path="triton"), argmax_logprob(view, path="reference")
        assert torch.equal(found[0].cpu(), expected[0])
        assert torch.allclose(found[1].cpu(), expected[1], rtol=0, atol=ROUNDING)


def test_can_be_traced(device: torch.device) -> None:
    logits = torch.randn(2, 3, 50, device=device)
    expected = argmax_logprob(logits, path="triton")
    compiled = torch.compile(lambda x: argmax_logprob(x, path="triton"), fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(logits), expected, strict=True):
        assert torch.equal(a, b)
    with FakeTensorMode() as mode:
        fake = argmax_logprob(mode.from_tensor(logits), path="triton")
    assert [(x.shape, x.dtype) for x in fake] == [(x.shape, x.dtype) for x in expected]
    torch.library.opcheck(torch.ops.hf_dcut.argmax_logprob, (logits.flatten(0, 1),))
