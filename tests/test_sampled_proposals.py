"""Drafts that are drawn: whatever is cut, tokens follow the target's law.

Thousands of draws from tiny models whose exact law is computed from plain forward passes. Each test of a distribution
fails by chance once in 10,000 runs (ALPHA); its seed is new every time, and printed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_dcut import DCutConfig, drafting
from hf_dcut.acceptance import accept
from hf_dcut.choosing import choose
from hf_dcut.drafters import DFlashDrafter, Drafter
from hf_dcut.drawing import draw_drafts
from hf_dcut.requests import Request
from hf_dcut.selecting import select
from hf_dcut.target import Target
from hf_dcut.types import Batch, Drafts, Packed, Proposal, Verdict

V, D, PROMPT = 8, 3, [3, 5, 4]
ALPHA = 1e-4
Chance = Callable[[torch.Tensor, torch.Tensor], float]


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    shape = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    return tiny_llama(torch.float32, **shape, num_attention_heads=2, num_key_value_heads=1, eos_token_id=None)


def drafter_for(model: PreTrainedModel, sharpness: float = 2.0, **options: Any) -> DFlashDrafter:
    """Returns a random drafter: what it is sure of has nothing to do with the target."""
    shape = {"taps": [0, 1], "mask_token_id": 3, "block_size": D + 1, "layers": 1, "dtype": torch.float32}
    drafter = DFlashDrafter.random(model.config, **shape, **options)
    drafter.model.norm.weight.fill_(sharpness)
    return drafter


@torch.no_grad()
def law(
    model: PreTrainedModel, count: int, temperature: float = 1.0, top_k: int = V, prompt: Sequence[int] = PROMPT
) -> torch.Tensor:
    """Returns the joint law of the first `count` tokens, float64 [V ** count], first token slowest."""
    texts, joint = torch.tensor([prompt]), torch.ones(1).double()
    for _ in range(count):
        logits = model(texts).logits[:, -1].double() / temperature
        rows = []
        for row in logits.tolist():
            lowest = sorted(row)[-top_k]
            weight = torch.tensor([x if x >= lowest else -torch.inf for x in row]).double().exp()
            rows.append(weight / weight.sum())
        joint = (joint[:, None] * torch.stack(rows)).flatten()
        texts = torch.cat([texts.repeat_interleave(V, 0), torch.arange(V).repeat(len(texts))[:, None]], dim=1)
    return joint


def draws(
    model: PreTrainedModel,
    drafter: Drafter,
    seed: int,
    budget: float,
    calls: int = 16,
    rows: int = 256,
    **options: Any,
) -> tuple[torch.Tensor, float]:
    """Returns how often each text of three tokens was sampled, int64 [V ** 3], and the mean of accepted drafts."""
    counts, accepted = torch.zeros(V**3, dtype=torch.int64), 0.0
    prompts = torch.tensor([PROMPT] * rows)
    asked = {"do_sample": True, "max_new_tokens": 3, "top_k": 0, "return_dict_in_generate": True, **options}
    for call in range(calls):
        output = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            **asked,
            seed=seed + call * rows,
            assistant_model=drafter,
            dcut=DCutConfig(budget=budget, proposals="sampled"),
        )
        place = (output.sequences[:, len(PROMPT) :] * torch.tensor([V * V, V, 1])).sum(1)
        counts += torch.bincount(place, minlength=V**3)
        accepted += output.stats.mean_accepted_tokens / calls
    return counts, accepted


def test_the_law_is_that_of_plain_generate(model: PreTrainedModel) -> None:
    prompts = torch.tensor([[*PROMPT, token] for token in range(V)])
    options = {"do_sample": True, "max_new_tokens": 1, "temperature": 0.7, "top_k": 3}
    output = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        **options,
        return_dict_in_generate=True,
        output_scores=True,
    )
    two, one = law(model, 2, 0.7, 3).view(V, V), law(model, 1, 0.7, 3)
    torch.testing.assert_close(output.scores[0].softmax(1).double() * one[:, None], two, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"top_k": 3}, {"temperature": 1.7, "top_k": 5}], ids=str)
@pytest.mark.parametrize("budget", [0.4, 1.0])
def test_tokens_follow_the_targets_law(
    model: PreTrainedModel, chance: Chance, fresh_seed: int, budget: float, options: dict[str, Any]
) -> None:
    counts, accepted = draws(model, drafter_for(model), fresh_seed, budget, **options)
    assert chance(counts, law(model, 3, **options)) > ALPHA
    assert accepted > 1.2, "drafts were verified and accepted"


@pytest.mark.parametrize("sharpness", [0.5, 6.0], ids=["unsure", "sure of the wrong"])
def test_whatever_the_drafter_thinks(model: PreTrainedModel, chance: Chance, fresh_seed: int, sharpness: float) -> None:
    counts, _ = draws(model, drafter_for(model, sharpness), fresh_seed, 0.4)
    assert chance(counts, law(model, 3)) > ALPHA


@pytest.mark.parametrize("options", [{}, {"top_k": 3}], ids=str)
def test_a_drafter_that_knows_half_the_vocabulary(
    model: PreTrainedModel, chance: Chance, fresh_seed: int, options: dict[str, Any]
) -> None:
    drafter = drafter_for(model, draft_ids=[1, 3, 4, 6])
    counts, _ = draws(model, drafter, fresh_seed, 0.4, **options)
    assert chance(counts, law(model, 3, **options)) > ALPHA


@pytest.mark.parametrize("budget", [0.4, 1.0])
def test_places_with_laws_unlike_each_other(
    model: PreTrainedModel, stub_drafter: Callable[..., Drafter], chance: Chance, fresh_seed: int, budget: float
) -> None:
    # A law for each place and each anchor.
    table = 2 * torch.randn(V, D, V, generator=torch.Generator().manual_seed(0))
    drafter = stub_drafter(D, logits=lambda batch: table[batch.anchor])
    counts, accepted = draws(model, drafter, fresh_seed, budget)
    assert chance(counts, law(model, 3)) > ALPHA
    assert accepted > 1.2


def seeing_what_was_drawn(*arguments: Any) -> Drafts:
    """Draws as the product does, but ranks drafts by the probability of the token that was drawn."""
    drafts = draw_drafts(*arguments)
    assert drafts.proposal is not None
    drawn = drafts.proposal.probability.gather(2, drafts.token[..., None])[..., 0]
    return replace(drafts, confidence=drawn)


def test_a_score_that_sees_the_drawn_token_is_caught(
    model: PreTrainedModel, chance: Chance, fresh_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "draw_drafts", seeing_what_was_drawn)
    counts, _ = draws(model, drafter_for(model), fresh_seed, 0.4)
    assert chance(counts, law(model, 3)) < ALPHA
    whole, _ = draws(model, drafter_for(model), fresh_seed, 1.0)
    assert chance(whole, law(model, 3)) > ALPHA, "where nothing is cut, nothing is selected"


# Four requests at once, with a target whose next token depends on the last one alone: thousands of draws in seconds.


@pytest.fixture
def chain(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], torch.Tensor]:
    """`chain(size)` makes every target such a one, and returns its law, float64 [size, size], last token first."""

    def install(size: int) -> torch.Tensor:
        logits = 2 * torch.randn(size, size, generator=torch.Generator().manual_seed(size))
        monkeypatch.setattr(
            Target, "forward", lambda self, packed, cache: (logits[packed.token[packed.logit_rows]], None)
        )
        return logits.double().softmax(dim=1)

    return install


def unlikeliest(texts: torch.Tensor, exact: torch.Tensor, chance: Chance) -> float:
    """Returns the least chance of what followed each token, one token and two, times how many chances these are.

    Args:
        texts: int64 [rows, n].
        exact: float64 [size, size], the law of the next token.
    """
    size = len(exact)
    last, first = texts[:, :-1].flatten(), texts[:, 1:].flatten()
    chances = [chance(torch.bincount(first[last == k], minlength=size), exact[k]) for k in range(size)]
    # Pieces that do not overlap, so that the two tokens behind each first one are independent of all others.
    pieces = texts[:, : texts.shape[1] // 3 * 3].reshape(-1, 3)
    two = pieces[:, 1] * size + pieces[:, 2]
    both = [(exact[k][:, None] * exact).flatten() for k in range(size)]
    chances += [chance(torch.bincount(two[pieces[:, 0] == k], minlength=size**2), both[k]) for k in range(size)]
    return min(chances) * len(chances)


def chained(model: PreTrainedModel, drafter: Drafter, budget: float, seed: int, calls: int = 8) -> torch.Tensor:
    """Returns texts int64 [4 * calls, 241] of four requests at once."""
    prompts, texts = torch.tensor([[3], [1], [6], [2]]), []
    for call in range(calls):
        tokens = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            **{"do_sample": True, "max_new_tokens": 240, "top_k": 0, "seed": seed + 4 * call},
            assistant_model=drafter,
            dcut=DCutConfig(budget=budget, proposals="sampled"),
        )
        texts.append(tokens)
    return torch.cat(texts)


@pytest.mark.parametrize(("budget", "size"), [(0.4, 8), (1.0, 8), (0.4, 32)])
def test_four_at_once_follow_the_law(
    tiny_llama: Callable[..., PreTrainedModel],
    stub_drafter: Callable[..., Drafter],
    chain: Callable[[int], torch.Tensor],
    chance: Chance,
    fresh_seed: int,
    budget: float,
    size: int,
) -> None:
    exact, guess = chain(size), torch.randn(size, D, size, generator=torch.Generator().manual_seed(0))
    drafter = stub_drafter(D, logits=lambda batch: 2 * guess[batch.anchor] + exact.log()[batch.anchor, None])
    model = tiny_llama(vocab_size=size, eos_token_id=None, pad_token_id=None)
    assert unlikeliest(chained(model, drafter, budget, fresh_seed), exact, chance) > ALPHA


def test_among_four_a_score_that_sees_the_drawn_token_is_caught(
    tiny_llama: Callable[..., PreTrainedModel],
    stub_drafter: Callable[..., Drafter],
    chain: Callable[[int], torch.Tensor],
    chance: Chance,
    fresh_seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exact, guess = chain(V), torch.randn(V, D, V, generator=torch.Generator().manual_seed(0))
    drafter = stub_drafter(D, logits=lambda batch: 2 * guess[batch.anchor] + exact.log()[batch.anchor, None])
    monkeypatch.setattr(drafting, "draw_drafts", seeing_what_was_drawn)
    model = tiny_llama(vocab_size=V, eos_token_id=None, pad_token_id=None)
    assert unlikeliest(chained(model, drafter, 0.4, fresh_seed), exact, chance) < ALPHA


# The paper's example (appendix B): p = q gives A, B, C the probabilities 0.5, 0.4, 0.1. If a draft is verified only
# when its own probability is among the best, here above 0.25, A is committed with 0.9 * 5/9 + 0.1 * 0.5 = 0.55.

SURE, RIVAL = [0.5, 0.4, 0.1, 0.0], [0.25] * 4


def commit_first(pairs: int, seed: int, draw: Callable[..., Drafts]) -> torch.Tensor:
    """Returns the first committed token of as many requests with law SURE, next to as many with law RIVAL.

    Each has one draft, and one draft for two requests can be verified: the stages from the draft to the verdict.
    """
    rows = 2 * pairs
    logits = torch.tensor([SURE] * pairs + [RIVAL] * pairs).log()[:, None]
    requests = [Request(i, [1], 9, read=1, tokens=[0], samples=True, seed=seed + i) for i in range(rows)]
    ones = torch.ones(rows, dtype=torch.int64)
    batch = Batch(torch.arange(rows), ones, 0 * ones, 9 * ones, seed + torch.arange(rows), 0 * ones)
    drafts = draw(logits, None, batch, requests, 4)
    packed, cut = select(drafts, batch, (0.75,), None, 9)
    assert cut.total == 3 * pairs
    request = torch.searchsorted(packed.start[1:].long(), torch.arange(len(packed)), right=True)
    choice = choose(logits[request, 0], packed, requests, drafts.proposal)
    return first_tokens(accept(choice.token, packed), packed)[:pairs]


def first_tokens(verdict: Verdict, packed: Packed) -> torch.Tensor:
    """Returns the first token that each request commits."""
    return torch.where(verdict.accepted > 0, packed.token[verdict.path[:, 1]], verdict.next)


def test_the_papers_example(chance: Chance, fresh_seed: int) -> None:
    pairs, seed = 20_000, fresh_seed % 2**40
    counts = torch.bincount(commit_first(pairs, seed, draw_drafts), minlength=4)
    assert chance(counts, torch.tensor(SURE)) > ALPHA
    biased = torch.bincount(commit_first(pairs, seed, seeing_what_was_drawn), minlength=4)
    assert chance(biased, torch.tensor(SURE)) < ALPHA
    assert chance(torch.stack([biased[0], pairs - biased[0]]), torch.tensor([0.55, 0.45])) > ALPHA


# The distribution itself.


def test_drafts_are_drawn_from_what_is_handed_on_as_their_law(chance: Chance, fresh_seed: int) -> None:
    rows, seed = 4_000, fresh_seed % 2**40
    logits = torch.tensor([[0.5, 2.0, -1.0, 0.0], [1.0, 1.0, 1.0, -torch.inf]])
    requests = [Request(i, [1], 9, read=1, tokens=[0], samples=True, seed=seed + i) for i in range(rows)]
    zeros = torch.zeros(rows, dtype=torch.int64)
    batch = Batch(torch.arange(rows), zeros, zeros, zeros + 9, seed + torch.arange(rows), zeros)
    drafts = draw_drafts(logits.expand(rows, 2, 4), torch.tensor([1, 2, 4, 5]), batch, requests, 6)
    assert isinstance(drafts.proposal, Proposal)
    full = torch.full((2, 6), -torch.inf).index_copy(1, torch.tensor([1, 2, 4, 5]), logits).softmax(dim=1)
    torch.testing.assert_close(drafts.proposal.probability, full.expand(rows, 2, 6))
    assert torch.equal(drafts.confidence, full.amax(dim=1).expand(rows, 2))
    for place in range(2):
        assert chance(torch.bincount(drafts.token[:, place], minlength=6), full[place]) > ALPHA
    pairs = torch.bincount(drafts.token[:, 0] * 6 + drafts.token[:, 1], minlength=36)
    assert chance(pairs, (full[0][:, None] * full[1]).flatten()) > ALPHA, "places are drawn apart from each other"


def test_the_same_seed_gives_the_same_draws_in_any_company(model: PreTrainedModel) -> None:
    prompts = torch.randint(0, V, (6, 4), generator=torch.Generator().manual_seed(0))
    options = {"do_sample": True, "max_new_tokens": 12, "top_k": 0, "assistant_model": drafter_for(model)}
    options["dcut"] = DCutConfig(budget=1.0, proposals="sampled")

    def run(rows: list[int]) -> list[list[int]]:
        ids = prompts[rows]
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), seed=[9 + row for row in rows], **options
        ).tolist()

    everyone = run(list(range(6)))
    assert run([4, 0, 2]) == [everyone[row] for row in (4, 0, 2)], "nothing is cut, so nobody is in the way"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_drafter_without_a_distribution_changes_nothing(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, bad: float
) -> None:
    prompts = torch.randint(0, V, (3, 4), generator=torch.Generator().manual_seed(0))
    options = {"attention_mask": torch.ones_like(prompts), "do_sample": True, "max_new_tokens": 8, "seed": 1}
    plain, drafter = model.generate(prompts, **options, dcut="none"), drafter_for(model)
    monkeypatch.setattr(
        type(drafter.bind(model, 1, 9)), "_logits", lambda _, batch: torch.full((len(batch), D, V), bad)
    )
    config = DCutConfig(budget=1.0, proposals="sampled")
    output = model.generate(prompts, **options, assistant_model=drafter, dcut=config, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain)
    assert output.stats.drafted_steps == 0


def test_greedy_requests_draft_greedily(model: PreTrainedModel) -> None:
    prompts = torch.randint(0, V, (3, 4), generator=torch.Generator().manual_seed(0))
    options = {"attention_mask": torch.ones_like(prompts), "do_sample": False, "max_new_tokens": 8}
    config = DCutConfig(budget=1.0, proposals="sampled")
    tokens = model.generate(prompts, **options, assistant_model=drafter_for(model), dcut=config)
    assert torch.equal(tokens, model.generate(prompts, **options))
