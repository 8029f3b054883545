"""Prepacked weights on a CPU: the same numbers from a copy, which is gone or made anew when weights may change."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import hf_dcut
from hf_dcut import prepacking
from hf_dcut.assembly import open_engine
from hf_dcut.config import DCutConfig
from hf_dcut.drafters.dflash.vocabulary import target_head
from hf_dcut.manager import BatchManager
from hf_dcut.prepacking import PackedForward, packed_linear, packs, prepacked, renew, runs_packed, works

pytestmark = pytest.mark.skipif(not works(torch.float32), reason="this torch cannot prepack weights")


def layer(outputs: int = 96, dtype: torch.dtype = torch.float32, bias: bool = False) -> nn.Linear:
    torch.manual_seed(outputs)
    return nn.Linear(48, outputs, bias, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 48), (1, 1, 48), (1, 7, 48), (3, 5, 48), (64, 48), (48,)])
def test_the_product_is_that_of_linear(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    linear, rows = layer(dtype=dtype, bias=bias), torch.randn(shape, dtype=dtype)
    with torch.no_grad():
        found = packed_linear(linear.weight, linear.bias)(rows)
        expected = linear(rows)
    assert found.shape == expected.shape
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-3)


def test_only_ordinary_weights_of_a_cpu_are_packed() -> None:
    assert packs(layer().weight)
    assert packs(layer(dtype=torch.bfloat16).weight) == works(torch.bfloat16)
    assert not packs(layer(dtype=torch.float64).weight)
    assert not packs(layer().weight.to("meta"))


def test_layers_run_packed_for_the_time_of_a_call() -> None:
    model = nn.Sequential(layer(48), nn.ReLU(), layer(96))
    before = [dict(vars(module)) for module in model]
    rows = torch.randn(5, 48)
    with torch.no_grad():
        expected = model(rows)
        with prepacked([model, model[0]], "auto"):
            assert [isinstance(m.forward, PackedForward) for m in model] == [True, False, True]
            torch.testing.assert_close(model(rows), expected, rtol=1e-4, atol=1e-5)
    assert [dict(vars(module)) for module in model] == before


def test_nothing_is_packed_where_it_is_not_wanted_or_the_copy_is_too_large(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = layer()
    with prepacked([model], False):
        assert "forward" not in vars(model)
    memory = type("Memory", (), {"available": 4 * model.weight.nbytes - 1})
    monkeypatch.setattr(prepacking.psutil, "virtual_memory", memory)
    caplog.set_level(logging.INFO, "hf_dcut")
    with prepacked([model], "auto"):
        assert "forward" not in vars(model)
    assert "weights are not prepacked: a copy takes 0.0 GiB" in caplog.text
    with prepacked([model], True):
        assert "forward" in vars(model)
    memory.available += 1
    with prepacked([model], "auto"):
        assert "forward" in vars(model)


def test_what_cannot_be_packed_is_told_where_it_must_be() -> None:
    with prepacked([layer(dtype=torch.float64)], "auto"):
        pass
    with pytest.raises(
        ValueError, match=r"dcut prepack=True: .* \(found: torch.float64 on cpu\). Give 'auto' or False"
    ):
        prepacked([layer(dtype=torch.float64)], True)
    with pytest.raises(ValueError, match=r"dcut prepack='yes': give 'auto', True or False"):
        DCutConfig(prepack="yes")


def test_gradients_are_those_of_the_weight() -> None:
    model, rows = layer(), torch.randn(4, 48)
    with prepacked([model], True):
        model(rows).square().sum().backward()
    found, model.weight.grad = model.weight.grad, None
    model(rows).square().sum().backward()
    assert torch.equal(found, model.weight.grad)  # type: ignore[arg-type]


def test_rows_of_another_dtype_are_linears_own_error() -> None:
    model = layer()
    with torch.no_grad(), prepacked([model], True), pytest.raises(RuntimeError, match="dtype"):
        model(torch.randn(4, 48, dtype=torch.float64))


def test_a_forward_of_somebody_elses_making_is_left_alone() -> None:
    model = layer()
    own = vars(model)["forward"] = lambda rows: rows
    with prepacked([model], True):
        assert model.forward is own


def test_a_copy_made_meanwhile_has_weights_of_its_own() -> None:
    model, rows = layer(), torch.randn(5, 48)
    with torch.no_grad(), prepacked([model], True):
        twin = copy.deepcopy(model)
        twin.weight.zero_()
        assert not twin(rows).any()
        assert model(rows).any()


def test_weights_that_changed_are_copied_anew() -> None:
    model, rows = layer(), torch.randn(5, 48)
    with torch.no_grad(), prepacked([model], True):
        model.weight.data.zero_()
        assert model(rows).any(), "it is a copy"
        renew(model)
        assert not model(rows).any()


@pytest.fixture
def single(tiny_llama: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    """Returns a float32 model."""
    return tiny_llama(eos_token_id=None).float()


def test_steps_run_packed_and_answers_stay(single: PreTrainedModel) -> None:
    inputs = torch.tensor([[5, 6, 7]] * 4)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6}
    expected = single.generate(inputs, **options)
    with open_engine(single, None, DCutConfig(budget="none"), 4, 3, 15):
        packed = [name for name, m in single.named_modules() if isinstance(vars(m).get("forward"), PackedForward)]
    assert {name.rpartition(".")[2] for name in packed} >= {"q_proj", "o_proj", "down_proj", "lm_head"}
    with open_engine(single, None, DCutConfig(budget="none"), 4, 3, 14):
        assert not runs_packed(single), "few tokens do not pay for it"
    for prepack in (True, False):
        assert torch.equal(
            hf_dcut.generate(single, inputs, dcut={"budget": "none", "prepack": prepack}, **options), expected
        )
    assert not any("forward" in vars(module) for module in single.modules())


@pytest.mark.parametrize("change", ["data", "in place"])
def test_weights_changed_between_calls_are_seen(single: PreTrainedModel, change: str) -> None:
    inputs = torch.tensor([[5, 6, 7]] * 6)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 5}
    for seed in range(2):
        torch.manual_seed(seed)
        for weight in (single.lm_head.weight, single.model.layers[0].self_attn.q_proj.weight):
            new = torch.randn_like(weight)
            with torch.no_grad():
                weight.data.copy_(new) if change == "data" else weight.copy_(new)
        found = hf_dcut.generate(single, inputs, dcut={"budget": "none", "prepack": True}, **options)
        assert torch.equal(found, single.generate(inputs, **options))


def test_a_manager_sees_weights_that_changed_while_nobody_waited(single: PreTrainedModel) -> None:
    prompt, tokens, plain = [5, 6, 7], [], {"budget": "none", "prepack": True}
    with BatchManager(
        single, dcut=plain, max_batch_size=2, max_length=16, do_sample=False, max_new_tokens=5
    ) as manager:
        for seed in range(2):
            torch.manual_seed(seed)
            single.lm_head.weight.data.normal_()
            manager.add_request(prompt)
            tokens.append(manager.get_result().generated_tokens)
            assert (
                tokens[-1] == single.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=5)[0, 3:].tolist()
            )
    assert tokens[0] != tokens[1]


def test_the_head_alone_is_packed_beside_compiled_layers(
    single: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[nn.Module]] = []
    pack = prepacking.prepacked
    monkeypatch.setattr(
        "hf_dcut.assembly.prepacked", lambda models, wanted: (asked.append(list(models)), pack([], wanted))[1]
    )
    with open_engine(single, None, DCutConfig(budget="none", compile=True), 1, 3, 9):
        pass
    assert asked == [[single.lm_head]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draft_vocabulary_is_a_part_of_the_head(single: PreTrainedModel, dtype: torch.dtype) -> None:
    """Asked for all logits, the head would cost more than the drafter's layers."""
    model, ids = single.to(dtype), torch.arange(0, 60, 2)
    hidden = torch.randn(5, model.config.hidden_size, dtype=dtype)
    with torch.no_grad(), prepacked([model], True):
        head = target_head(model, ids, dtype, torch.device("cpu"))
        model.lm_head.weight.data.zero_()
        found = head(hidden)
    assert found.shape == (5, 30)
    assert found.any(), "rows of the weight, copied for the call"
