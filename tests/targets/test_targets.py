"""Every architecture of the table says under dcut what it says alone; `--grid` runs all combinations."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from recurrent_targets import RECURRENT
from target_cases import Case, Refusal
from target_table import CASES, PAGE, REFUSED, page
from transformers import PreTrainedModel

from hf_dcut import CostTable, DCutConfig, DCutOutput, PromptLookupDrafter
from hf_dcut.drafters import DFlashDrafter
from hf_dcut.drafters.base import Drafter
from hf_dcut.target import Target
from hf_dcut.trial import check_model

Inputs = dict[str, torch.Tensor]
D, NEW = 4, 20
BATCHES, BUDGETS, DRAFTERS = (1, 3, 8), ("auto", 0.5, 1.0), ("dflash", "oracle")
# Of the largest logit, which `generate` hands out in float32. Stock eager attention has its softmax in float32, too.
APART = {(torch.float64, "sdpa"): 1e-6, (torch.float64, "eager"): 1e-5, (torch.float32, "sdpa"): 1e-4}


Combination = tuple[int, Any, str, str]


def combinations(case: Case) -> list[Combination]:
    """Returns every batch size, budget, drafter and attention of a case, those with the same text in a row."""
    grid = product(BATCHES, case.attentions, BUDGETS, DRAFTERS)
    return [(batch, budget, drafter, attention) for batch, attention, budget, drafter in grid]


def one_combination(index: int, case: Case) -> Combination:
    """Returns one for a case, so that all pairs come up among the cases."""
    batch, budget = BATCHES[index // 3 % 3], BUDGETS[(index + index // 3) % 3]
    return batch, budget, DRAFTERS[index % 2], case.attentions[index // 2 % len(case.attentions)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "combination" not in metafunc.fixturenames:
        return
    every = metafunc.config.getoption("grid")
    cells = []
    for index, case in enumerate(CASES):
        grid = combinations(case) if every else [one_combination(index, case)]
        cells += [pytest.param(case, cell, id=f"{case.name}-{'-'.join(map(str, cell))}") for cell in grid]
    metafunc.parametrize(("case", "combination"), cells)


def costs() -> CostTable:
    """Returns a table in which drafting pays when a good half of the drafts hold, and more rows cost more."""
    rows = {}
    for requests in (1, 2, 4, 8):
        full = requests * (D + 1)
        rows[requests] = {0: 1.0} | {round(r * full): 1.2 + r * requests / 16 for r in (0.25, 0.5, 0.75, 1.0)}
    return CostTable.from_rows(rows, D)


def generate(model: PreTrainedModel, inputs: Inputs, **options: Any) -> DCutOutput:
    if options.get("dcut") == "auto":
        options["dcut"] = DCutConfig(cost_table=costs(), deterministic=True)
    fixed = {"do_sample": False, "max_new_tokens": NEW, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(**inputs, **(fixed | options))


def alone(model: PreTrainedModel, inputs: Inputs) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns what plain `generate` says to each prompt by itself, and the logits [B, V] of each new token.

    Without padding, on which stock eager attention in float64 gives NaN: its softmax is in float32, where the lowest
    float64 is -inf.
    """
    rows = []
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True):
        rows.append(generate(model, {"input_ids": ids[mask][None], "attention_mask": mask[mask][None].long()}))
    new = torch.cat([row.sequences[:, -NEW:] for row in rows])
    logits = [torch.cat(column) for column in zip(*(row.logits for row in rows), strict=True)]
    return torch.cat([inputs["input_ids"], new], dim=1), logits


def drafter_of(
    name: str, case: Case, model: PreTrainedModel, inputs: Inputs, said: torch.Tensor, knowing: Callable[..., Drafter]
) -> Drafter:
    if name == "oracle":
        return knowing(inputs, said, D)
    if not case.taps:
        return PromptLookupDrafter(D)
    shape = {"taps": [0, 2], "mask_token_id": 3, "block_size": D + 1, "layers": 1, "dtype": model.dtype}
    return DFlashDrafter.random(model.config, **shape)


Said = tuple[PreTrainedModel, Inputs, torch.Tensor, list[torch.Tensor]]


@pytest.fixture(scope="module")
def stock(make_prompts: Callable[..., Inputs]) -> Callable[[Case, int, str], Said]:
    """A case's model, prompts, and what it says alone; kept for the next combination of the same."""
    latest: dict[tuple[str, int, str], Said] = {}

    def say(case: Case, batch: int, attention: str) -> Said:
        key = case.name, batch, attention
        if key not in latest:
            model, inputs = case.build(attention), make_prompts(batch, seed=batch, longest=14)
            latest.clear()
            latest[key] = model, inputs, *alone(model, inputs)
        return latest[key]

    return say


def test_lossless(
    case: Case,
    combination: Combination,
    stock: Callable[[Case, int, str], Said],
    knowing: Callable[..., Drafter],
) -> None:
    batch, budget, drafter, attention = combination
    model, inputs, said, logits = stock(case, batch, attention)
    proposer = drafter_of(drafter, case, model, inputs, said, knowing)
    output = generate(model, inputs, assistant_model=proposer, dcut=budget)
    assert torch.equal(output.sequences, said)
    assert output.stats is not None
    assert output.stats.drafted > 0
    assert output.stats.accepted_tokens > 0 or drafter != "oracle"
    apart = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(output.logits, logits, strict=True))
    assert apart <= (case.apart or APART[case.dtype, attention])
    assert len(said[:, -NEW:].unique()) >= 8, "text that is a loop shows little"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_trees(case: Case, stock: Callable[[Case, int, str], Said], knowing_aside: Callable[..., Drafter]) -> None:
    """Full attention knows them: what is accepted lies behind wrong siblings."""
    model, inputs, said, logits = stock(case, 3, case.attentions[0])
    trees = {"assistant_model": knowing_aside(inputs, said, D), "dcut": DCutConfig(budget=0.8, draft_tree=True)}
    with Target(model) as target:
        full = all(getattr(shape, "window", 0) is None for shape in target.shapes)
    assert full == (case not in RECURRENT and not {"sliding_window", "layer_types"} & set(case.fields))
    if not full:
        with pytest.raises(ValueError, match=f"draft_tree=True: {type(model).__name__} has recurrent or sliding"):
            generate(model, inputs, **trees)
        return
    output = generate(model, inputs, **trees)
    assert torch.equal(output.sequences, said)
    assert output.stats is not None
    assert output.stats.accepted_tokens > 3
    apart = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(output.logits, logits, strict=True))
    assert apart <= (case.apart or APART[case.dtype, case.attentions[0]])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sampled(case: Case, make_prompts: Callable[..., Inputs], knowing: Callable[..., Drafter]) -> None:
    model, inputs = case.build(), make_prompts(3, seed=2, longest=14)
    options = {"do_sample": True, "top_k": 20, "temperature": 0.8, "seed": [5, 8, 13]}
    plain = generate(model, inputs, dcut="none", **options)
    for name in DRAFTERS:
        proposer = drafter_of(name, case, model, inputs, plain.sequences, knowing)
        output = generate(model, inputs, assistant_model=proposer, dcut=0.5, **options)
        assert torch.equal(output.sequences, plain.sequences)
    assert not torch.equal(plain.sequences, generate(model, inputs).sequences)


@pytest.mark.parametrize("case", [case for case in CASES if not case.taps], ids=lambda case: case.name)
def test_layers_that_no_drafter_can_read(
    case: Case, make_prompts: Callable[..., Inputs], stub_drafter: Callable[..., Drafter]
) -> None:
    with pytest.raises(ValueError, match=r"prompt.lookup"):
        generate(case.build(), make_prompts(2), assistant_model=stub_drafter(D, taps=(0,)), dcut=0.5)


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda refusal: refusal.name)
def test_refused_by_name(refusal: Refusal) -> None:
    model = refusal.build()
    with pytest.raises(ValueError, match=f"{type(model).__name__}.*{refusal.told}.*[Ww]ithout dcut"):
        check_model(model)


def test_one_combination_a_case_meets_all_pairs() -> None:
    chosen = [one_combination(index, case) for index, case in enumerate(CASES)]
    for first, second in ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)):
        pairs = {(cell[first], cell[second]) for case in CASES for cell in combinations(case)}
        assert pairs == {(cell[first], cell[second]) for cell in chosen}


def test_names_are_told_apart() -> None:
    names = [row.name for row in (*CASES, *REFUSED)]
    assert len(set(names)) == len(names)


def test_the_page_is_the_table(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("grid"):
        PAGE.write_text(page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page(), "docs/targets.md is out of date: make test-targets writes it"
