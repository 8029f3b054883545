"""The head of a few rows on a CPU: the same numbers, cut along the vocabulary, for the time of a call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

import hf_dcut
from hf_dcut.assembly import open_engine
from hf_dcut.config import DCutConfig
from hf_dcut.drafters.dflash.vocabulary import target_head
from hf_dcut.requests import Request
from hf_dcut.thin import THIN, ThinForward, thin_head, thin_linear

PIECES, WHOLE = 256, 131


class Products(TorchDispatchMode):
    """Collects the names of matrix products and the shapes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm", "addmm"):
            self.seen.append((name, tuple(out.shape)))
        return out


def tensors(rows: int, outputs: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    shapes = ((rows, 48), (outputs, 48), (outputs,))
    hidden, weight, bias = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    return hidden, weight, bias


@pytest.mark.parametrize("outputs", [PIECES, WHOLE, 96])
@pytest.mark.parametrize("rows", [1, 3, 4, 11, 15, 16, 40])
def test_the_product_is_that_of_linear(rows: int, outputs: int) -> None:
    hidden, weight, bias = tensors(rows, outputs)
    for given in (None, bias):
        torch.testing.assert_close(thin_linear(hidden, weight, given), F.linear(hidden, weight, given))


def test_any_leading_shape_is_kept() -> None:
    hidden, weight, bias = tensors(6, PIECES)
    expected = F.linear(hidden, weight, bias)
    for shape in ((1, 6), (2, 3), (6,), (3, 1, 2)):
        torch.testing.assert_close(
            thin_linear(hidden.view(*shape, -1), weight, bias), expected.view(*shape, -1), msg=f"{shape}"
        )


@pytest.mark.parametrize("rows", [1, 3, 4, 15, 16])
def test_only_thin_rows_are_cut(rows: int) -> None:
    hidden, weight, _ = tensors(rows, PIECES)
    with Products() as products:
        thin_linear(hidden, weight)
    assert products.seen == [("bmm", (2, rows, 128)) if rows in THIN else ("mm", (rows, PIECES))]


@pytest.mark.parametrize("case", ["float64", "bfloat16", "uneven", "transposed"])
def test_what_gains_nothing_is_linear_itself(case: str) -> None:
    dtype = getattr(torch, case, torch.float32)
    hidden, weight, bias = tensors(8, WHOLE if case == "uneven" else PIECES, dtype)
    if case == "transposed":
        weight = weight.t().contiguous().t()
    with Products() as products:
        found = thin_linear(hidden, weight, bias)
    assert torch.equal(found, F.linear(hidden, weight, bias))
    assert [name for name, _ in products.seen] == ["addmm"]


def test_gradients_are_those_of_linear() -> None:
    hidden, weight, bias = (x.requires_grad_() for x in tensors(8, PIECES))
    found = torch.autograd.grad(thin_linear(hidden, weight, bias).square().sum(), (hidden, weight, bias))
    expected = torch.autograd.grad(F.linear(hidden, weight, bias).square().sum(), (hidden, weight, bias))
    torch.testing.assert_close(found, expected)


def test_the_head_is_changed_for_the_time_of_a_call(tiny_llama: Callable[..., PreTrainedModel]) -> None:
    model = tiny_llama()
    head = model.lm_head
    before = dict(vars(head))
    with open_engine(model, None, DCutConfig(budget="none"), 1, 4, 8):
        assert isinstance(head.forward, ThinForward)
    assert vars(head) == before


def wide(tiny_llama: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    """Returns a float32 model whose vocabulary can be cut."""
    return tiny_llama(vocab_size=PIECES, eos_token_id=None).float()


def test_plain_steps_of_a_batch_take_it(tiny_llama: Callable[..., PreTrainedModel]) -> None:
    model = wide(tiny_llama)
    requests = [Request(index, [5, 6, 7 + index], 6) for index in range(5)]
    with open_engine(model, None, DCutConfig(budget="none"), 5, 3, 9) as engine, Products() as products:
        list(engine.run(requests))
    assert ("bmm", (2, 5, 128)) in products.seen
    inputs = torch.tensor([request.prompt for request in requests])
    expected = model.generate(inputs, do_sample=False, max_new_tokens=6)[:, 3:]
    assert [request.tokens for request in requests] == expected.tolist()


def test_a_head_of_somebody_elses_making_is_left_alone(tiny_llama: Callable[..., PreTrainedModel]) -> None:
    model = tiny_llama()
    own = model.lm_head.forward
    model.lm_head.forward = own
    with thin_head(model):
        assert model.lm_head.forward is own
    model = tiny_llama()
    model.lm_head = nn.Sequential(model.lm_head)
    with thin_head(model):
        assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("ours", [True, False])
def test_a_draft_vocabulary_is_a_part_of_a_head_that_only_we_changed(
    tiny_llama: Callable[..., PreTrainedModel], ours: bool
) -> None:
    """Asked for all logits, the head would cost more than the drafter's layers."""
    model = wide(tiny_llama)
    if not ours:
        model.lm_head.forward = model.lm_head.forward
    ids = torch.arange(0, 128, 2)
    hidden = torch.randn(5, model.config.hidden_size)
    with thin_head(model), Products() as products:
        logits = target_head(model, ids, torch.float32, torch.device("cpu"))(hidden)
    widths = {shape[-1] * (shape[0] if name == "bmm" else 1) for name, shape in products.seen}
    assert widths == {64 if ours else PIECES}
    torch.testing.assert_close(logits, F.linear(hidden, model.lm_head.weight)[:, ids])


def test_a_draft_vocabulary_in_bfloat16_is_laid_out_by_columns(tiny_llama: Callable[..., PreTrainedModel]) -> None:
    """Turning the weight over at every call would take as long as the product."""
    model = wide(tiny_llama).bfloat16()
    ids = torch.arange(0, 128, 2)
    hidden = torch.randn(5, model.config.hidden_size, dtype=torch.bfloat16)
    head = target_head(model, ids, torch.bfloat16, torch.device("cpu"))
    torch.testing.assert_close(head(hidden), F.linear(hidden, model.lm_head.weight[ids]))
    (weight,) = (cell.cell_contents for cell in head.__closure__ or () if isinstance(cell.cell_contents, torch.Tensor))
    assert weight.stride() == (1, 64)


def test_a_copy_made_meanwhile_has_weights_of_its_own(tiny_llama: Callable[..., PreTrainedModel]) -> None:
    model = wide(tiny_llama)
    with thin_head(model):
        twin = copy.deepcopy(model)
    hidden = torch.randn(5, model.config.hidden_size)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
        assert not twin.lm_head(hidden).any()
        assert model.lm_head(hidden).any()


def test_weights_changed_between_calls_are_seen(tiny_llama: Callable[..., PreTrainedModel]) -> None:
    model = wide(tiny_llama)
    inputs = torch.tensor([[5, 6, 7]] * 6)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 5}
    for seed in range(2):
        torch.manual_seed(seed)
        nn.init.normal_(model.lm_head.weight)
        found = hf_dcut.generate(model, inputs, dcut="none", **options)
        assert torch.equal(found, model.generate(inputs, **options))
