"""Recordings: drafts at every position, and what of them is right."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from hf_dcut.bench.trace import Trace, record
from hf_dcut.drafters.base import Drafter
from hf_dcut.requests import Request


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


def test_traces_survive_json(make_traces: Callable[..., list[Trace]]) -> None:
    (trace,) = make_traces(1, tokens=9, depth=3)
    trace = Trace(
        trace.prompt_tokens, 12, 9, trace.confidence, trace.offered.index_fill(0, torch.tensor(2), 1), trace.accepted
    )
    trace.confidence[2, 1:] = 0.0
    back = Trace.from_dict(json.loads(json.dumps(trace.to_dict())))
    assert (back.prompt_tokens, back.max_new_tokens, back.tokens) == (20, 12, 9)
    assert torch.equal(back.offered, trace.offered)
    assert torch.equal(back.accepted, trace.accepted)
    torch.testing.assert_close(back.confidence, trace.confidence, atol=5e-5, rtol=0)  # four digits are kept


def test_visited_positions_follow_the_accepted_drafts() -> None:
    accepted = torch.tensor([2, 0, 5, 1, 0, 0])
    trace = Trace(3, 7, 7, torch.zeros(6, 4), torch.full((6,), 4), accepted)
    assert trace.visited() == [0, 3, 5]
