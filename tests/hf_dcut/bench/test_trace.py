"""Recordings: drafts at every position, and what of them is right."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from transformers import PreTrainedModel

from hf_dcut.bench.trace import Trace, record
from hf_dcut.drafters.base import BoundDrafter, Drafter
from hf_dcut.requests import Request
from hf_dcut.types import Batch, Committed, Drafts


@pytest.fixture
def model(make_target: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return make_target("llama", eos_token_id=None)


def test_a_recording_has_the_drafts_of_every_position(
    model: PreTrainedModel, knowing: Callable[..., Drafter], make_prompts: Callable[..., dict[str, torch.Tensor]]
) -> None:
    inputs = make_prompts(5)
    sequences = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    drafter = knowing(inputs, sequences)
    prompts = [row[mask.bool()].tolist() for row, mask in zip(*inputs.values(), strict=True)]
    requests = [Request(id=i, prompt=prompt, max_new_tokens=12, seed=i) for i, prompt in enumerate(prompts)]
    traces = record(model, drafter, requests, slots=2)
    said = sequences[:, inputs["input_ids"].shape[1] :].tolist()
    assert [request.tokens for request in requests] == said
    for trace, prompt in zip(traces, prompts, strict=True):
        assert (trace.prompt_tokens, trace.tokens, trace.max_new_tokens, trace.depth) == (len(prompt), 12, 12, 6)
        assert trace.confidence.shape == (11, 6)
        # The last position has no room for drafts; a draft beyond the answer cannot be accepted.
        assert all(0 <= a <= min(o, 11 - p) for p, (a, o) in enumerate(zip(trace.accepted, trace.offered, strict=True)))
        # The oracle's confidences are those of its profile; those that are sure never err.
        sure = (trace.confidence == 1.0).all(1) & (trace.offered == 6)
        assert (trace.accepted[sure] == torch.arange(11, 0, -1)[sure].clamp_max(6)).all()
    assert any((trace.accepted == 0).any() for trace in traces)
    shorter = record(
        model, drafter, [Request(id=i, prompt=p, max_new_tokens=12, seed=i) for i, p in enumerate(prompts)], 5, 2
    )
    for trace, short in zip(traces, shorter, strict=True):
        assert (short.accepted == trace.accepted.clamp_max(2)).all()
        assert torch.equal(short.confidence, trace.confidence[:, :2])


def test_requests_must_differ_by_seed(model: PreTrainedModel, knowing: Callable[..., Drafter]) -> None:
    requests = [Request(id=i, prompt=[5, 6], max_new_tokens=4) for i in range(2)]
    drafter = knowing({"input_ids": torch.tensor([[5]]), "attention_mask": torch.ones(1, 1)}, torch.tensor([[5, 6]]))
    with pytest.raises(ValueError, match="requests share seeds"):
        record(model, drafter, requests, slots=2)


@dataclass
class TwoLines(Drafter):
    """Proposes, of an answer and one that differs in the second token, a tree: a, b wrong, b right, c behind either.

    Attributes:
        answer: what the target says to the one prompt [5, 6].
    """

    answer: list[int]
    draft_tokens = 5
    branches = True

    def check(self, target: PreTrainedModel) -> None: ...

    def cell_bytes(self, target: PreTrainedModel) -> int:
        return 0

    def fingerprint(self) -> dict[str, object]:
        return {}

    def bind(self, target: PreTrainedModel, slots: int, length: int) -> BoundDrafter:
        return BoundTwoLines(self.answer)


class BoundTwoLines(BoundDrafter):
    def __init__(self, answer: list[int]):
        self.answer = answer

    def propose(self, batch: Batch) -> Drafts:
        raise AssertionError("trees are asked for")

    def propose_tree(self, batch: Batch, nodes: int) -> Drafts:
        a, b, c = (self.answer + [0] * 3)[int(batch.length) - 1 :][:3]
        token = torch.tensor([[a, b + 1, b, c, c]])
        parent = torch.tensor([[-1, 0, 0, 1, 2]])
        return Drafts(token, torch.tensor([5]), torch.tensor([[0.5, 1.0, 1.0, 1.0, 1.0]]), parent)

    def observe(self, committed: Committed) -> None: ...

    def move(self, source: int, destination: int) -> None: ...

    def copy(self, source: int, destination: int, length: int) -> None: ...

    def free(self, slot: int) -> None: ...


def test_of_trees_the_path_is_kept(model: PreTrainedModel) -> None:
    inputs = torch.tensor([[5, 6]])
    answer = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=6)[0, 2:].tolist()
    request = Request(id=0, prompt=[5, 6], max_new_tokens=6)
    (trace,) = record(model, TwoLines(answer), [request], slots=1, tree=True)
    assert trace.parent is not None
    # The first token is certain; drafts are recorded behind each but the last, of which one has no room for any.
    assert trace.offered.tolist() == [5, 5, 5, 5, 0]
    assert trace.parent[0, :5].tolist() == [-1, 0, 0, 1, 2]
    assert trace.place[0, :5].tolist() == [0, 1, 1, 2, 2]
    paths = [row.nonzero().flatten().tolist() for row in trace.right]
    assert paths == [[0, 2, 4], [0, 2, 4], [0, 2, 4], [0, 2], []]
    assert trace.accepted.tolist() == [3, 3, 3, 2, 0]
    back = Trace.from_dict(json.loads(json.dumps(trace.to_dict())))
    assert back.parent is not None
    for mine, theirs in ((back.parent, trace.parent), (back.right, trace.right), (back.offered, trace.offered)):
        assert torch.equal(mine, theirs)


def test_traces_survive_json(make_traces: Callable[..., list[Trace]]) -> None:
    (trace,) = make_traces(1, tokens=9, depth=3)
    trace = Trace(
        trace.prompt_tokens, 12, 9, trace.confidence, trace.offered.index_fill(0, torch.tensor(2), 1), trace.right
    )
    trace.confidence[2, 1:], trace.right[2, 1:] = 0.0, False
    back = Trace.from_dict(json.loads(json.dumps(trace.to_dict())))
    assert (back.prompt_tokens, back.max_new_tokens, back.tokens) == (20, 12, 9)
    assert torch.equal(back.offered, trace.offered)
    assert torch.equal(back.right, trace.right)
    assert back.parent is None
    torch.testing.assert_close(back.confidence, trace.confidence, atol=5e-5, rtol=0)  # four digits are kept


def test_visited_positions_follow_the_accepted_drafts() -> None:
    accepted = torch.tensor([2, 0, 5, 1, 0, 0])
    right = torch.arange(5) < accepted[:, None]
    trace = Trace(3, 7, 7, torch.zeros(6, 5), torch.full((6,), 5), right)
    assert trace.visited() == [0, 3, 5]
