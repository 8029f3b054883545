"""Several drafters at once: whose drafts are taken, what each of them sees, and that the text stays the target's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_dcut import BatchRequest, BestOf, PromptLookupDrafter, generate_batch, warmup
from hf_dcut.assembly import open_engine
from hf_dcut.branching import parents
from hf_dcut.config import DCutConfig
from hf_dcut.drafters import DFlashDrafter, Drafter
from hf_dcut.requests import Request
from hf_dcut.types import Batch, Committed, Drafts

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 14}
Build = Callable[..., DFlashDrafter]


def chain(confidence: list[list[float]], count: list[int], first: int) -> Drafts:
    """Returns chains whose tokens are first, first + 1, ... in each row."""
    sure = torch.tensor(confidence)
    return Drafts.chain(torch.arange(first, first + sure.shape[1]).expand(sure.shape), sure, torch.tensor(count))


def batch_of(rows: int) -> Batch:
    places = torch.arange(rows)
    return Batch(places, places + 5, places + 3, torch.full_like(places, 99), places, torch.zeros_like(places))


def taken(stub_drafter: Callable[..., Any], model: PreTrainedModel, *offers: Drafts) -> Drafts:
    stubs = [stub_drafter(offer.token.shape[1], lambda batch, offer=offer: offer) for offer in offers]
    return BestOf(stubs).bind(model, 8, 40).propose(batch_of(len(offers[0].count)))


def test_each_request_gets_the_drafts_that_promise_most(
    stub_drafter: Callable[..., Any], model: PreTrainedModel
) -> None:
    # In survivals: 0.9 + 0.45 + 0.045; 0.5; 0.2 + 0.02; nothing.
    three = chain([[0.9, 0.5, 0.1], [0.5, 0.9, 0.9], [0.2, 0.1, 1.0], [1.0, 1.0, 1.0]], [3, 1, 2, 0], 10)
    # In survivals: 0.6 + 0.36 + 0.36; 0.5; 7 x 1.0; 0.1.
    seven = chain([[0.6, 0.6, *[1.0] * 5], [0.5, *[1.0] * 6], [1.0] * 7, [0.1, *[1.0] * 6]], [3, 1, 7, 1], 50)
    drafts = taken(stub_drafter, model, three, seven)
    assert drafts.token.shape == drafts.confidence.shape == parents(drafts).shape == (4, 7)
    assert drafts.parent is None, "a chain"
    assert drafts.count.tolist() == [3, 1, 7, 1]
    assert drafts.token[:, 0].tolist() == [10, 10, 50, 50], "more survives; a tie, to the earlier; longer; any"
    assert drafts.token[0].tolist() == [10, 11, 12, 0, 0, 0, 0], "padded with tokens"
    assert drafts.token[2].tolist() == list(range(50, 57))
    assert drafts.confidence[0].tolist() == pytest.approx([0.9, 0.5, 0.1, 0, 0, 0, 0])
    assert drafts.confidence[2].tolist() == [1.0] * 7


def test_a_tie_goes_to_the_earlier_whichever_it_is(stub_drafter: Callable[..., Any], model: PreTrainedModel) -> None:
    first, second, third = (chain([[0.25, 0.5]], [2], token) for token in (10, 20, 30))
    assert taken(stub_drafter, model, first, second, third).token.tolist() == [[10, 11]]
    assert taken(stub_drafter, model, third, second, first).token.tolist() == [[30, 31]]


@pytest.mark.parametrize("beyond", [1.0, torch.nan, torch.inf])
def test_what_stands_behind_the_last_draft_promises_nothing(
    stub_drafter: Callable[..., Any], model: PreTrainedModel, beyond: float
) -> None:
    short, long = chain([[0.7, beyond, beyond]], [1], 10), chain([[0.6, 0.4]], [2], 20)
    assert taken(stub_drafter, model, short, long).token[0, 0] == 20, "0.7 against 0.84"


# What each of them sees.


def committed(slot: int, tokens: list[int], taps: torch.Tensor) -> Committed:
    cell = torch.arange(len(tokens))
    return Committed(torch.full_like(cell, slot), cell, cell, torch.tensor(tokens), taps, (), (), (), ())


def test_each_drafter_reads_its_own_taps(model: PreTrainedModel, make_drafter: Build) -> None:
    """Two block drafters with different taps and one without: inside, each keeps what it keeps alone."""
    parts: list[Drafter] = [
        make_drafter(model, seed=1, taps=(0, 2)),
        PromptLookupDrafter(4),
        make_drafter(model, seed=2, taps=(1,), block_size=4),
    ]
    both = BestOf(parts)
    assert both.taps == (0, 2, 1)
    assert both.draft_tokens == 4
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(3, 6, model.config.hidden_size, generator=generator, dtype=model.dtype)
    bound, alone = both.bind(model, 3, 20), [part.bind(model, 3, 20) for part in parts]
    for slot in (0, 1, 2):
        tokens = [5 + slot, 6, 7, 5 + slot, 6, 7]
        bound.observe(committed(slot, tokens, torch.cat([states[tap] for tap in both.taps], 1)))
        for part, drafter in zip(parts, alone, strict=True):
            drafter.observe(committed(slot, tokens, torch.cat([states[tap] for tap in part.taps or (0,)], 1)))
    for drafter in (bound, *alone):
        drafter.move(2, 0)
        drafter.free(2)
        drafter.copy(0, 1, 4)
    places = torch.tensor([0, 1])
    batch = Batch(places, torch.tensor([6, 4]), torch.tensor([7, 8]), places + 9, places, torch.zeros_like(places))
    for inner, drafter in zip(bound.drafters, alone, strict=True):
        found, expected = inner.propose(batch), drafter.propose(batch)
        assert torch.equal(found.token, expected.token)
        assert torch.equal(found.confidence, expected.confidence)
        assert torch.equal(found.count, expected.count)


def test_without_taps_none_are_split() -> None:
    bound = BestOf([PromptLookupDrafter(2), PromptLookupDrafter(3, 1)])
    assert bound.taps == ()
    assert BestOf([bound, PromptLookupDrafter(5)]).draft_tokens == 5, "one of several may be of several"


# The text stays the target's.


@pytest.fixture(scope="module")
def looping(make_target: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    """A target whose text falls into loops, which prompt lookup hits."""
    return make_target("llama", seed=3, initializer_range=0.08, eos_token_id=None)


@pytest.fixture
def both(looping: PreTrainedModel, make_drafter: Build) -> BestOf:
    return BestOf([make_drafter(looping), PromptLookupDrafter(6)])


@pytest.mark.parametrize("dcut", [0.3, 1.0])
def test_a_ragged_batch_says_what_plain_generate_says(
    looping: PreTrainedModel, both: BestOf, make_prompts: Callable[..., Any], dcut: float
) -> None:
    inputs = make_prompts(5, seed=1)
    options = {**GREEDY, "max_new_tokens": 30, "return_dict_in_generate": True}
    output = looping.generate(**inputs, **options, assistant_model=both, dcut=dcut)
    assert torch.equal(output.sequences, looping.generate(**inputs, **options).sequences)
    assert output.stats.accepted_tokens > 0


def test_more_requests_than_slots(looping: PreTrainedModel, both: BestOf) -> None:
    """Slots are left, filled up from behind and taken again; prompts asked for several answers are copied."""
    prompts = [[5 + n, 6, 7, 5 + n, 6][: 1 + n % 5] for n in range(11)]
    requests = [BatchRequest(prompt) for prompt in prompts]
    results = generate_batch(
        looping, requests, assistant_model=both, dcut=0.6, max_batch_size=3, progress_bar=False, **GREEDY
    )
    for prompt, result in zip(prompts, results.values(), strict=True):
        ids = torch.tensor([prompt])
        expected = looping.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)[0, len(prompt) :]
        assert result.generated_tokens == expected.tolist()


def test_several_answers_share_their_prompt(looping: PreTrainedModel, both: BestOf) -> None:
    ids, drawn = torch.tensor([[5, 6, 7, 5, 6, 7]]), {"do_sample": True, "max_new_tokens": 10, "seed": 4}
    texts = [
        looping.generate(ids, **drawn, num_return_sequences=3, assistant_model=assistant, dcut=dcut)
        for assistant, dcut in ((both, 1.0), (None, "none"))
    ]
    assert torch.equal(*texts)


def test_moves_give_each_drafter_its_requests(looping: PreTrainedModel, both: BestOf) -> None:
    """With everything verified, drafts depend on no neighbour: as many hold with three slots as with one for each."""
    accepted = []
    for slots in (3, 9):
        requests = [Request(n, [5 + n, 6, 7, 5 + n, 6], 6 + n * 5 % 11, frozenset()) for n in range(9)]
        with open_engine(looping, both, DCutConfig(budget=1.0), slots, 5, 40) as engine:
            assert len(list(engine.run(requests))) == 9
            accepted.append(engine.stats.accepted_tokens)
    assert accepted[0] == accepted[1] > 0


# What it says of itself.


def test_a_graph_holds_it_when_it_holds_all(
    looping: PreTrainedModel, both: BestOf, stub_drafter: Callable[..., Any]
) -> None:
    assert both.bind(looping, 2, 20).capturable
    assert not BestOf([both, stub_drafter(3)]).bind(looping, 2, 20).capturable


def test_what_it_costs_is_what_they_cost(looping: PreTrainedModel, both: BestOf) -> None:
    block, lookup = both.drafters
    assert both.cell_bytes(looping) == block.cell_bytes(looping) + lookup.cell_bytes(looping)
    assert both.fingerprint() == {"kind": "best of", "drafters": [block.fingerprint(), lookup.fingerprint()]}
    assert not both.independent
    assert repr(both) == "BestOf(DFlashDrafter, PromptLookupDrafter)"


def test_it_is_warmed_up_as_any_other(looping: PreTrainedModel, both: BestOf) -> None:
    table = warmup(looping, both, [1, 2], {"cost_table": "off"}, 30)
    assert table.fingerprint["drafter"] == both.fingerprint()


def test_one_that_does_not_fit_is_named(make_target: Callable[..., PreTrainedModel], both: BestOf) -> None:
    with pytest.raises(ValueError, match="drafter hidden_size=64, but the target has 32"):
        both.check(make_target("llama", hidden_size=32))


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"BestOf got {count} drafters?: give two or more"):
        BestOf([PromptLookupDrafter()] * count)


def test_what_cannot_draft_is_refused() -> None:
    with pytest.raises(TypeError, match=r"BestOf got a str, .*AutoDrafter"):
        BestOf([PromptLookupDrafter(), "examples/drafter"])  # type: ignore[list-item]
