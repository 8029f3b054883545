"""The replay takes the steps of a real run, whatever cuts; and on it the global, cost-aware cut beats the others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from hf_dcut.assembly import open_engine
from hf_dcut.bench.policies import limited, rule_of
from hf_dcut.bench.simulator import replay
from hf_dcut.bench.surface import surface_of
from hf_dcut.bench.trace import Trace, record
from hf_dcut.config import PAPER_RATIOS, DCutConfig
from hf_dcut.cost_table import CostTable
from hf_dcut.drafters.base import Drafter
from hf_dcut.drafters.wrapping import Wrapped
from hf_dcut.requests import Request
from hf_dcut.stats import Stats, StepRecord

METHODS = ("plain", "auto", "1.0", "0.5", "0.25", "uniform-2", "tetris-9", "threshold-0.5", "tree-auto", "tree-0.5")
EOS = 77  # a token that several of the answers below come to say


def _costs(depth: int) -> CostTable:
    """Returns costs that grow with T, so that budgets differ and some steps are better without drafts."""
    rows = {b: {0: 0.8, **{b + k * b: 1 + 0.12 * b * k for k in range(depth + 1)}} for b in (1, 2, 3)}
    return CostTable.from_rows(rows, depth)


def _row(record: StepRecord) -> tuple[object, ...]:
    return record.requests, record.drafted, record.kept, record.accepted, record.committed, record.budget, record.total


@pytest.mark.parametrize("method", METHODS)
def test_a_replay_takes_the_steps_of_the_run(
    method: str,
    make_target: Callable[..., PreTrainedModel],
    knowing: Callable[..., Drafter],
    knowing_aside: Callable[..., Drafter],
    make_prompts: Callable[..., dict[str, torch.Tensor]],
) -> None:
    model, inputs, tree = make_target("llama", eos_token_id=EOS), make_prompts(7), method.startswith("tree-")
    sequences = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    prompts = [row[mask.bool()].tolist() for row, mask in zip(*inputs.values(), strict=True)]
    drafter = (knowing_aside if tree else knowing)(inputs, sequences)

    def requests() -> list[Request]:
        return [
            Request(id=i, prompt=prompt, max_new_tokens=16, eos=frozenset({EOS}), seed=i)
            for i, prompt in enumerate(prompts)
        ]

    traces = record(model, drafter, requests(), slots=3, draft_tokens=6, tree=tree)
    assert any(trace.tokens < 16 for trace in traces)
    budget, policy = rule_of(method.removeprefix("tree-"))
    config = DCutConfig(budget=budget, cost_table=_costs(6), deterministic=True, draft_tree=tree, draft_tokens=6)
    proposer = drafter if policy is None else Wrapped(drafter, limited(policy, 6))
    with open_engine(model, None if method == "plain" else proposer, config, 3, 12, 28, Stats(records=[])) as engine:
        list(engine.run(requests()))
        real = engine.stats
    replayed = replay(traces, 3, method, _costs(6))
    assert [_row(r) for r in replayed.stats.records or ()] == [_row(r) for r in real.records or ()]
    assert replayed.stats.new_tokens == sum(trace.tokens for trace in traces)
    if method.endswith("auto"):
        assert len(real.budgets) > 1


def test_seconds_are_those_of_the_table(make_traces: Callable[..., list[Trace]]) -> None:
    traces = make_traces(2, tokens=5, depth=2, moods=(1.0,), prompt_tokens=10)
    costs = CostTable.from_rows({1: {0: 7.0, 1: 1.0, 3: 3.0}, 2: {0: 9.0, 2: 2.0, 6: 6.0}}, 2)
    replayed = replay(traces, 2, "plain", costs, reading=0.1)
    # Both prompts in one step of 20 tokens, which gives each its first; the other four take plain steps.
    assert replayed.step_seconds == [pytest.approx(2.0), 9.0, 9.0, 9.0, 9.0]
    assert replayed.tokens_per_second == pytest.approx(10 / 38)
    assert replayed.steps == [4, 4]
    one = replay(traces, 1, "plain", costs)
    assert one.seconds == pytest.approx(8 * 7.0)


def test_shorter_drafts_and_what_is_refused(make_traces: Callable[..., list[Trace]]) -> None:
    traces, costs = make_traces(3, tokens=20, depth=4), _costs(4)
    assert max(replay(traces, 2, "1.0", costs, draft_tokens=2).stats.histogram) <= 2
    with pytest.raises(ValueError, match="draft_tokens=5: 4 were recorded"):
        replay(traces, 2, "1.0", costs, draft_tokens=5)
    with pytest.raises(ValueError, match="traces is empty"):
        replay([], 2, "1.0", costs)
    with pytest.raises(ValueError, match="method 'fast'"):
        replay(traces, 2, "fast", costs)
    with pytest.raises(
        ValueError, match="method 'tree-auto': the traces are of chains, tree- goes with those of trees"
    ):
        replay(traces, 2, "tree-auto", costs)


OTHERS = (
    *(f"uniform-{depth}" for depth in (2, 4, 6, 9, 15)),
    *(f"tetris-{positions}" for positions in (32, 128, 256, 512)),
    *(f"threshold-{survival}" for survival in (0.05, 0.1, 0.2, 0.3, 0.5)),
)
# Of one replay, which ends with a draining batch: a step more or less is some two percent.
A_STEP_OR_TWO = 0.04


@pytest.mark.slow
def test_the_global_cost_aware_cut_beats_the_others(make_traces: Callable[..., list[Trace]]) -> None:
    """On the paper's two devices, B = 8 and 64, with calibrated drafts.

    "auto" is given nothing but the cost table. With sixteenths to choose from, it is never more than a step or two
    behind the setting of another policy that is best for that very device and batch; with the paper's quarters it is up
    to a tenth behind a confidence threshold so tuned. And no setting is right everywhere: each is 5 % behind somewhere.
    """
    speed: dict[str, list[float]] = {}
    for device in ("h20", "h800"):
        for slots in (8, 64):
            traces, costs = make_traces(2 * slots), surface_of(device)
            for method in ("auto", *OTHERS):
                speed.setdefault(method, []).append(replay(traces, slots, method, costs).tokens_per_second)
            coarse = replay(traces, slots, "auto", costs, ratios=PAPER_RATIOS)
            speed.setdefault("quarters", []).append(coarse.tokens_per_second)
    best = [max(speeds) for speeds in zip(*(speed[method] for method in OTHERS), strict=True)]
    assert min(a / b for a, b in zip(speed["auto"], best, strict=True)) >= 1 - A_STEP_OR_TWO
    assert min(a / b for a, b in zip(speed["quarters"], best, strict=True)) >= 0.88
    for method in OTHERS:
        for own in ("auto", "quarters"):
            assert min(b / a for a, b in zip(speed[own], speed[method], strict=True)) <= 0.95, method
