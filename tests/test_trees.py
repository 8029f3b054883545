"""Draft trees: with them, too, `generate` says exactly what it says without.

Random models in float64, where packed and padded rows agree to the last few bits. The drafter knows the answer, but
puts a wrong token before each right one, so that what is accepted lies on side branches; tests assert that it does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_dcut import (
    BatchRequest,
    BestOf,
    CostTable,
    DCutConfig,
    DCutOutput,
    PromptLookupDrafter,
    generate_batch,
    warmup,
)
from hf_dcut import engine as engine_module
from hf_dcut.assembly import fingerprint, open_engine
from hf_dcut.commit import commit
from hf_dcut.drafters import DFlashDrafter
from hf_dcut.drafters.base import Drafter
from hf_dcut.requests import Request
from hf_dcut.target import Target
from hf_dcut.types import Committed, Packed, Verdict

Inputs = dict[str, torch.Tensor]
D, NEW = 6, 24
GREEDY = {"do_sample": False, "max_new_tokens": NEW, "return_dict_in_generate": True}


class Watch:
    """Counts accepted drafts: all, those on side branches, those with a prompt beside them; and steps with drafts."""

    def __init__(self) -> None:
        self.accepted = self.aside = self.beside_prompts = self.trees = self.chains = 0

    def see(self, verdict: Verdict, packed: Packed, *others: Any) -> Committed:
        rows = verdict.path[verdict.path >= 0]
        aside = int((packed.cell[rows] != packed.text_cells()[rows]).sum())
        self.accepted += int(verdict.accepted.sum())
        self.aside += aside
        if len(packed.used) > packed.decoding:
            self.beside_prompts += aside
        if packed.ancestors is not None:
            self.trees += 1
        elif packed.start[packed.decoding] > packed.decoding:
            self.chains += 1
        return commit(verdict, packed, *others)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch = Watch()
    monkeypatch.setattr(engine_module, "commit", watch.see)
    return watch


@pytest.fixture(scope="module")
def model(make_target: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return make_target("llama", eos_token_id=None)


Stock = tuple[Inputs, torch.Tensor]
Knowing = Callable[..., Drafter]


@pytest.fixture(scope="module")
def plain(model: PreTrainedModel, make_prompts: Callable[..., Inputs]) -> Callable[[int], Stock]:
    """`plain(rows)`: ragged prompts, and what the model says to them without dcut."""
    found: dict[int, Stock] = {}

    def say(rows: int) -> Stock:
        if rows not in found:
            inputs = make_prompts(rows, seed=rows)
            found[rows] = inputs, model.generate(**inputs, **GREEDY).sequences
        return found[rows]

    return say


def without_padding(inputs: Inputs) -> list[list[int]]:
    rows = zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)
    return [ids[mask].tolist() for ids, mask in rows]


def random_dflash(model: PreTrainedModel, depth: int = D) -> DFlashDrafter:
    shape = {"taps": [0, 2], "mask_token_id": 3, "block_size": depth + 1, "layers": 2, "dtype": model.dtype}
    return DFlashDrafter.random(model.config, **shape)


def invented_costs() -> CostTable:
    """Returns a table in which drafting pays when a good half of the drafts hold, and more rows cost more."""
    rows = {}
    for requests in (1, 2, 4, 8, 16):
        full = requests * (D + 1)
        rows[requests] = {0: 1.0} | {round(r * full): 1.2 + r * requests / 16 for r in (0.25, 0.5, 0.75, 1.0)}
    return CostTable.from_rows(rows, D)


def generate(model: PreTrainedModel, inputs: Inputs, drafter: Drafter, budget: Any, **options: Any) -> DCutOutput:
    config: dict[str, Any] = {"budget": budget, "draft_tree": True}
    if budget == "auto":
        config |= {"draft_tree": D, "cost_table": invented_costs(), "deterministic": True}
    own = {name: options.pop(name) for name in ("draft_tree", "max_prefill_tokens", "draft_tokens") if name in options}
    return model.generate(**inputs, **(GREEDY | options), assistant_model=drafter, dcut=DCutConfig(**(config | own)))


# Greedy text.


@pytest.mark.parametrize("budget", ["auto", 0.3, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 17])
def test_every_token_is_that_of_plain_generate(
    model: PreTrainedModel, plain: Callable[[int], Stock], watch: Watch, rows: int, budget: Any, knowing_aside: Knowing
) -> None:
    inputs, tokens = plain(rows)
    output = generate(model, inputs, knowing_aside(inputs, tokens), budget)
    assert torch.equal(output.sequences, tokens)
    stats = output.stats
    assert stats is not None
    assert watch.trees > 0
    assert watch.chains == 0
    assert watch.aside == watch.accepted == stats.accepted_tokens
    assert stats.accepted_tokens > rows, "side branches were taken"
    assert stats.accepted_tokens <= stats.kept <= stats.drafted


def test_the_sums_of_a_sure_drafter(
    model: PreTrainedModel, plain: Callable[[int], Stock], watch: Watch, knowing_aside: Knowing
) -> None:
    inputs, tokens = plain(5)
    stats = generate(model, inputs, knowing_aside(inputs, tokens, profile=(1.0,)), 1.0).stats
    assert stats is not None
    # One token comes with the prompt, then three drafts and one more a step. In the sixth step three are left, and room
    # for two nodes, of which one is wrong; the last token comes without drafts.
    assert stats.histogram == {3: 5 * 5, 1: 5}
    assert (stats.drafted_steps, stats.plain_steps) == (6, 1)
    assert watch.aside == watch.accepted == 5 * 16
    assert stats.kept == 5 * (5 * D + 2)


@pytest.mark.parametrize("budget", ["auto", 0.5, 1.0])
@pytest.mark.parametrize("kind", ["dflash", "both", "three", "deep"])
def test_drafters_as_they_come(
    model: PreTrainedModel, plain: Callable[[int], Stock], watch: Watch, kind: str, budget: Any, knowing_aside: Knowing
) -> None:
    inputs, tokens = plain(8)
    lookup = PromptLookupDrafter(D)
    drafter = {
        "dflash": lambda: random_dflash(model),
        "both": lambda: BestOf([knowing_aside(inputs, tokens), lookup]),
        "three": lambda: BestOf([random_dflash(model), lookup, knowing_aside(inputs, tokens)]),
        "deep": lambda: BestOf([random_dflash(model, 15), random_dflash(model, 11)]),
    }[kind]()
    if kind == "deep" and budget == "auto":
        budget = 0.2
    output = generate(model, inputs, drafter, budget)
    assert torch.equal(output.sequences, tokens)
    assert watch.trees > 0
    assert watch.chains == 0
    assert watch.aside > 0 or kind in ("dflash", "deep")


@pytest.mark.parametrize("rows", [3, 17])
def test_a_long_tree_beside_short_ones(
    model: PreTrainedModel, plain: Callable[[int], Stock], watch: Watch, rows: int, knowing_aside: Knowing
) -> None:
    """Whose last nodes attention takes apart from the rest."""
    inputs, tokens = plain(rows)
    drafter = BestOf([knowing_aside(inputs, tokens, profile=(0.0, 1.0)), random_dflash(model, 30)])
    output = generate(model, inputs, drafter, 0.25)
    assert torch.equal(output.sequences, tokens)
    assert watch.aside > 0
    assert output.stats is not None
    assert any(max(kept) - min(kept) >= 6 for kept in output.stats.kept_depths)


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_fewer_draft_tokens_than_the_tree(
    model: PreTrainedModel, plain: Callable[[int], Stock], watch: Watch, depth: int, knowing_aside: Knowing
) -> None:
    inputs, tokens = plain(5)
    output = generate(model, inputs, knowing_aside(inputs, tokens), 1.0, draft_tokens=depth)
    assert torch.equal(output.sequences, tokens)
    assert output.stats is not None
    assert max(map(max, output.stats.kept_depths)) == depth
    assert (watch.aside > 0) == (depth > 1), "the first node is wrong"


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_few_tokens(model: PreTrainedModel, plain: Callable[[int], Stock], count: int, knowing_aside: Knowing) -> None:
    inputs, tokens = plain(5)
    output = generate(model, inputs, knowing_aside(inputs, tokens), 1.0, max_new_tokens=count)
    assert torch.equal(output.sequences, tokens[:, : inputs["input_ids"].shape[1] + count])


def test_end_tokens_on_side_branches(
    model: PreTrainedModel, plain: Callable[[int], Stock], watch: Watch, knowing_aside: Knowing
) -> None:
    inputs, tokens = plain(8)
    width = inputs["input_ids"].shape[1]
    ending = {"eos_token_id": [tokens[row, width + 2 * row + 1].item() for row in range(8)], "pad_token_id": 0}
    expected = model.generate(**inputs, **GREEDY, **ending).sequences
    output = generate(model, inputs, knowing_aside(inputs, tokens), 0.6, **ending)
    assert torch.equal(output.sequences, expected)
    assert watch.aside > 0
    assert len({(row != 0).sum().item() for row in expected[:, width:]}) >= 4


def test_in_float32_and_memory_that_was_never_written(
    make_target: Callable[..., PreTrainedModel],
    plain: Callable[[int], Stock],
    watch: Watch,
    poisoned_memory: None,
    knowing_aside: Knowing,
) -> None:
    inputs, model = plain(5)[0], make_target("qwen3", torch.float32, eos_token_id=None)
    tokens = model.generate(**inputs, **GREEDY).sequences
    output = generate(model, inputs, knowing_aside(inputs, tokens), 0.6, max_prefill_tokens=4)
    assert torch.equal(output.sequences, tokens)
    assert watch.aside > 0


def test_measuring_costs_leaves_no_trace_in_the_text(
    model: PreTrainedModel, plain: Callable[[int], Stock], knowing_aside: Knowing
) -> None:
    inputs, tokens = plain(5)
    for drafter in (knowing_aside(inputs, tokens), random_dflash(model)):
        config = DCutConfig(cost_table="off", draft_tree=True)
        output = model.generate(**inputs, **GREEDY, assistant_model=drafter, dcut=config)
        assert output.stats.profile_seconds > 0
        assert torch.equal(output.sequences, tokens)


# Prompts beside trees.


@pytest.mark.parametrize("at_once", [1, 5, 33])
def test_prompts_longer_than_a_step_reads(
    model: PreTrainedModel, make_prompts: Callable[..., Inputs], watch: Watch, at_once: int, knowing_aside: Knowing
) -> None:
    inputs = make_prompts(6, seed=5, longest=40)
    tokens = model.generate(**inputs, **GREEDY).sequences
    output = generate(model, inputs, knowing_aside(inputs, tokens), 0.6, max_prefill_tokens=at_once)
    assert torch.equal(output.sequences, tokens)
    assert watch.beside_prompts > 0


def test_jobs_of_more_requests_than_slots(
    model: PreTrainedModel, make_prompts: Callable[..., Inputs], watch: Watch, knowing_aside: Knowing
) -> None:
    inputs = make_prompts(14, seed=9)
    said = model.generate(**inputs, **GREEDY).sequences
    tokens = said[:, inputs["input_ids"].shape[1] :].tolist()
    prompts = without_padding(inputs)
    drafter = knowing_aside(inputs, said)
    for slots, budget in ((3, 0.6), (5, 1.0)):
        results = generate_batch(
            model,
            [BatchRequest(prompt) for prompt in prompts],
            assistant_model=drafter,
            dcut={"budget": budget, "draft_tree": True},
            max_batch_size=slots,
            progress_bar=False,
            do_sample=False,
            max_new_tokens=NEW,
        )
        assert [result.generated_tokens for result in results.values()] == tokens
    assert watch.beside_prompts > 0
    assert watch.chains == 0


@pytest.mark.parametrize("kind", ["oracle", "dflash"])
@pytest.mark.parametrize("every", [0, 2, 3])
def test_slots_are_refilled_and_taken_away(
    model: PreTrainedModel,
    make_prompts: Callable[..., Inputs],
    watch: Watch,
    kind: str,
    every: int,
    knowing_aside: Knowing,
) -> None:
    """Texts stay their own while requests leave, others join their rows, and some lose their slots on the way."""
    inputs = make_prompts(9, seed=3)
    said = model.generate(**inputs, **GREEDY).sequences
    tokens = said[:, inputs["input_ids"].shape[1] :].tolist()
    drafter = knowing_aside(inputs, said) if kind == "oracle" else random_dflash(model)
    requests = [Request(n, prompt, 8 + 5 * n % 13) for n, prompt in enumerate(without_padding(inputs))]
    with open_engine(model, drafter, DCutConfig(budget=0.7, draft_tree=True), 4, 12, 12 + NEW) as engine:
        for request in requests:
            engine.roster.add(request)
        steps = 0
        while engine.busy:
            engine.step()
            steps += 1
            if every and steps % every == 0 and len(engine.roster.live) > 1:
                engine.evict(engine.roster.live[steps % len(engine.roster.live)])
                assert steps < 500
        assert (engine.stats.evictions > 0) == (every > 0)
        assert [request.tokens for request in requests] == [
            text[: request.max_new_tokens] for request, text in zip(requests, tokens, strict=True)
        ]
    assert watch.trees > 0
    assert watch.beside_prompts > 0 or kind == "dflash"


def test_what_a_drafter_knows_does_not_depend_on_company(
    model: PreTrainedModel, make_prompts: Callable[..., Inputs]
) -> None:
    """With everything verified as many drafts hold with three slots as with one for each, so its K/V are as told."""
    inputs, outcomes = make_prompts(9, seed=3), []
    drafter = BestOf([random_dflash(model), PromptLookupDrafter(D, 1)])
    for slots in (1, 3, 9):
        requests = [Request(n, prompt, 8 + 5 * n % 13) for n, prompt in enumerate(without_padding(inputs))]
        config = DCutConfig(budget=1.0, draft_tree=True)
        with open_engine(model, drafter, config, slots, 12, 12 + NEW) as engine:
            list(engine.run(requests))
        outcomes.append([(r.totals.steps, r.totals.kept, r.totals.accepted) for r in requests])
    assert outcomes[0] == outcomes[1] == outcomes[2]


# What else may be asked of a call.


@pytest.mark.parametrize(
    "options", [{"top_k": 0}, {"top_k": 5, "temperature": 0.8}, {"top_p": 0.8, "typical_p": 0.9}], ids=str
)
@pytest.mark.parametrize("budget", [0.4, 1.0])
def test_samples_are_those_of_their_seeds(
    model: PreTrainedModel,
    plain: Callable[[int], Stock],
    watch: Watch,
    budget: float,
    options: dict[str, Any],
    knowing_aside: Knowing,
) -> None:
    inputs, _ = plain(5)
    asked = {**GREEDY, "do_sample": True, "seed": [31, 4, 159, 26, 5], **options}
    alone = model.generate(**inputs, **asked, dcut="none").sequences
    drafter = knowing_aside(inputs, alone)
    output = generate(model, inputs, drafter, budget, **asked)
    assert torch.equal(output.sequences, alone)
    assert watch.aside == watch.accepted > 5
    assert watch.chains == 0
    chains = generate(model, inputs, drafter, budget, **asked, draft_tree=False)
    assert torch.equal(chains.sequences, alone)
    assert watch.chains > 0


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("budget", [0.4, 1.0])
def test_what_is_kept_is_what_plain_generate_keeps(
    model: PreTrainedModel,
    plain: Callable[[int], Stock],
    watch: Watch,
    budget: float,
    sample: bool,
    knowing_aside: Knowing,
) -> None:
    inputs, _ = plain(5)
    asked: dict[str, Any] = {**GREEDY, "do_sample": sample, "output_scores": True, "output_logits": True}
    asked |= {"top_k": 20, "temperature": 0.7, "seed": 3} if sample else {}
    asked["output_logprobs"] = True
    alone = model.generate(**inputs, **asked, dcut="none")
    output = generate(model, inputs, knowing_aside(inputs, alone.sequences), budget, **asked)
    assert watch.aside == watch.accepted > 5
    assert torch.equal(output.sequences, alone.sequences)
    assert len(output.scores) == len(output.logits) == NEW
    for kept, expected in ((output.scores, alone.scores), (output.logits, alone.logits)):
        for row, other in zip(kept, expected, strict=True):
            torch.testing.assert_close(row, other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output.logprobs, alone.logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "trees"),
    [
        ({"repetition_penalty": 1.4}, False),
        ({"no_repeat_ngram_size": 2}, False),
        ({"suppress_tokens": [5, 6, 7]}, True),
    ],
    ids=str,
)
def test_processors_that_look_at_the_text_are_given_chains(
    model: PreTrainedModel,
    plain: Callable[[int], Stock],
    watch: Watch,
    options: dict[str, Any],
    trees: bool,
    knowing_aside: Knowing,
) -> None:
    inputs, _ = plain(5)
    expected = model.generate(**inputs, **GREEDY, **options).sequences
    output = generate(model, inputs, knowing_aside(inputs, expected), 0.6, **options)
    assert torch.equal(output.sequences, expected)
    assert watch.accepted > 5
    assert (watch.aside > 0) == trees
    assert (watch.chains == 0) == trees


def test_requests_of_both_kinds_in_a_job(
    model: PreTrainedModel, make_prompts: Callable[..., Inputs], watch: Watch, knowing_aside: Knowing
) -> None:
    """Steps turn from trees to chains and back as those come and go whose processors look at the text."""
    inputs = make_prompts(10, seed=6)
    prompts = without_padding(inputs)
    requests, texts = [], []
    for n, prompt in enumerate(prompts):
        config = GenerationConfig(
            max_new_tokens=NEW, do_sample=False, eos_token_id=None, **({"repetition_penalty": 1.3} if n == 4 else {})
        )
        ids = torch.tensor([prompt])
        texts.append(model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0].tolist())
        requests.append(BatchRequest(prompt, generation_config=config))
    new = torch.tensor([text[-NEW:] for text in texts])
    results = generate_batch(
        model,
        requests,
        assistant_model=knowing_aside(inputs, torch.cat([inputs["input_ids"], new], dim=1)),
        dcut=0.7,
        max_batch_size=3,
        progress_bar=False,
    )
    assert [result.prompt_ids + result.generated_tokens for result in results.values()] == texts
    assert watch.trees > 0
    assert watch.chains > 0
    assert watch.beside_prompts > 0


# Whether there are trees.


def test_auto_makes_trees_where_it_can(
    model: PreTrainedModel, plain: Callable[[int], Stock], watch: Watch, knowing_aside: Knowing
) -> None:
    inputs, tokens = plain(5)
    for drafter, config, trees in (
        (knowing_aside(inputs, tokens), {}, True),
        (random_dflash(model), {}, True),
        (BestOf([random_dflash(model), PromptLookupDrafter(D)]), {}, True),
        (random_dflash(model), {"draft_tree": False}, False),
        (random_dflash(model), {"proposals": "sampled"}, False),
        (PromptLookupDrafter(D, 1), {}, False),
    ):
        watch.trees = watch.chains = 0
        output = model.generate(**inputs, **GREEDY, assistant_model=drafter, dcut={"budget": 1.0, **config})
        assert torch.equal(output.sequences, tokens)
        assert (watch.trees > 0, watch.chains > 0) == (trees, not trees)


def test_costs_of_trees_are_not_those_of_chains(model: PreTrainedModel) -> None:
    drafter = random_dflash(model)
    with Target(model) as target:
        chains, trees = (fingerprint(target, drafter, tree=tree) for tree in (False, True))
    assert chains != trees
    assert chains | {"draft_tree": True} == trees
    for wanted, expected, nodes in (("auto", trees, 15), (True, trees, 15), (9, trees, 9), (False, chains, D)):
        table = warmup(model, drafter, [1], {"cost_table": "off", "draft_tree": wanted}, max_length=20)
        assert table.fingerprint == expected | {"draft_tokens": nodes}
