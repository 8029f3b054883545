"""Methods side by side, on a tiny model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from hf_dcut.bench import report
from hf_dcut.bench.compare import DEFAULT_METHODS, compare, equal_rows, options_of
from hf_dcut.bench.lossless import margin
from hf_dcut.bench.runner import make_drafter
from hf_dcut.config import DCutConfig
from hf_dcut.cost_table import CostTable


@pytest.fixture
def model(make_target: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return make_target("llama", dtype=torch.float32)


def test_all_methods_give_the_same_tokens_and_a_table(model: PreTrainedModel) -> None:
    batches = [
        {"input_ids": torch.tensor([[5, 6, 7], [8, 9, 10]]), "attention_mask": torch.ones(2, 3, dtype=torch.long)}
    ]
    drafter = make_drafter("oracle", model, batches, 12)
    costs = CostTable.from_rows({2: {0: 1.0, 2: 1.0, 8: 1.1, 16: 1.2, 24: 1.3, 32: 1.4}}, draft_tokens=15)
    config = DCutConfig(cost_table=costs, deterministic=True)
    measured = compare(model, batches, DEFAULT_METHODS, drafter, config, max_new_tokens=12, rounds=2)
    assert [entry.name for entry in measured] == list(DEFAULT_METHODS)
    assert all(equal_rows(entry, measured[0]) == 2 and len(entry.ratios) == 2 for entry in measured)
    assert measured[0].ratios == [1.0, 1.0]
    assert not measured[0].stats
    assert measured[1].share("committed_tokens", "rows") is None  # plain steps have no verify rows
    lines = report.table(measured).splitlines()
    assert len(lines) == 2 + len(DEFAULT_METHODS)
    assert all(line.endswith("2/2         |") for line in lines[2:])
    numbers = report.as_dict(measured)
    assert [n["equal_rows"] for n in numbers] == [2] * 7
    assert numbers[-1]["selection_share"] > 0


def test_an_unknown_method_is_named() -> None:
    with pytest.raises(ValueError, match=r"method .fast.: give generate, plain, 1\.0"):
        options_of("fast", None, DCutConfig())


def test_the_margin_of_the_first_difference(model: PreTrainedModel) -> None:
    prompt, answer = [5, 6, 7], [8, 9]
    assert margin(model, prompt, answer, answer) is None
    with torch.no_grad():
        best = model(torch.tensor([[*prompt, 8]])).logits[0, -1].topk(2).values
    assert margin(model, prompt, [8, 1], answer) == pytest.approx(float(best[0] - best[1]), abs=1e-5)  # float32 logits
