from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import hf_dcut
from hf_dcut.app.models import Models
from hf_dcut.app.run import Run
from hf_dcut.app.settings import Limits, Settings
from hf_dcut.drafters.prompt_lookup import PromptLookupDrafter

PROMPTS = ["a b c a b c a b", "one two one two one", "xyzzy xyzzy xy", "<script>alert(1)</script>"]


def padded(models: Models, prompts: list[str]) -> dict[str, Tensor]:
    inputs = models.tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


def generated(models: Models, prompts: list[str], **options: object) -> list[list[int]]:
    """Returns what `generate` says, cut at each row's end token."""
    inputs = padded(models, prompts)
    rows: Tensor = models.model.generate(**inputs, max_new_tokens=24, **options)
    texts = rows[:, inputs["input_ids"].shape[1] :].tolist()
    return [row[: row.index(2) + 1] if 2 in row else row for row in texts]


@pytest.mark.parametrize("method", ["cut", "all", "plain"])
@pytest.mark.parametrize("drafter", ["lookup", "random"])
def test_greedy_text_is_that_of_generate(
    models: Models, finished: Callable[..., Run], method: str, drafter: str
) -> None:
    trace = finished(method, drafter=drafter).trace
    assert [answer.tokens for answer in trace.answers] == generated(models, PROMPTS, do_sample=False)


@pytest.mark.parametrize("budget", ["auto", 0.5])
def test_sampled_text_is_that_of_generate(models: Models, finished: Callable[..., Run], budget: float | str) -> None:
    trace = finished(budget=budget, sample=True, temperature=0.8, top_k=20, top_p=0.9, seed=5).trace
    # Sampling keys each token by seed and position, so plain decoding on the same engine gives the very same text.
    assert [answer.tokens for answer in trace.answers] == generated(
        models, PROMPTS, do_sample=True, temperature=0.8, top_k=20, top_p=0.9, seed=5, dcut="none"
    )


def test_pieces_make_up_the_text(models: Models, finished: Callable[..., Run]) -> None:
    for answer in finished().trace.answers:
        text = "".join(piece.text for piece in answer.pieces)
        assert text == models.tokenizer.decode(answer.tokens, skip_special_tokens=True)


def test_trace_counts_what_the_engine_counted(finished: Callable[..., Run]) -> None:
    run = finished(budget=0.5)
    trace, stats = run.trace, run.engine.stats
    assert trace.kept == stats.kept > 0
    assert trace.accepted == stats.accepted_tokens
    assert trace.drafted == stats.drafted
    assert trace.tokens == stats.new_tokens == sum(step.new_tokens for step in trace.steps) + len(PROMPTS)
    assert sum(step.verified for step in trace.steps if step.budget is not None) == stats.verified_positions
    assert sum(piece.drafted for answer in trace.answers for piece in answer.pieces) == stats.accepted_tokens
    assert stats.accepted_tokens > 0, "the text repeats its prompt: lookup must hit"


@pytest.mark.parametrize("drafter", ["lookup", "random"])
def test_each_draft_is_told_as_it_was(finished: Callable[..., Run], drafter: str) -> None:
    steps = [step for step in finished(budget=0.5, drafter=drafter).trace.steps if step.budget is not None]
    assert steps
    for step in steps:
        drafts = [draft for row in step.rows for draft in row.drafts]
        lowest = min((d.survival for d in drafts if d.kept), default=1.0)
        assert all(d.survival <= lowest for d in drafts if not d.kept), "the cut keeps the best of the whole batch"
        for row in step.rows:
            for place, draft in enumerate(row.drafts):
                before = row.drafts[draft.parent] if draft.parent >= 0 else None
                assert draft.parent < place
                assert draft.parent == place - 1 or drafter == "random", "a look-up is a chain"
                assert math.isclose(
                    draft.survival, (before.survival if before else 1.0) * draft.confidence, rel_tol=1e-5
                )
                assert draft.kept == (place < row.kept)
                if draft.accepted:
                    assert draft.kept
                    assert before is None or before.accepted
            own = [draft.parent for draft in row.drafts if draft.accepted]
            assert len(own) == len(set(own)) == row.accepted, "one path"


def test_the_curve_has_its_top_where_auto_chose(finished: Callable[..., Run]) -> None:
    curves = [step.curve for step in finished(budget="auto", drafter="random").trace.steps if step.curve]
    assert curves
    for curve in curves:
        best = max(curve.rates[curve.at(total)] for _, total in curve.candidates)
        assert math.isclose(curve.rates[curve.at(curve.chosen)], best, rel_tol=1e-5)


def test_a_run_can_be_closed_and_then_does_not_step(models: Models, settings: Callable[..., Settings]) -> None:
    run = Run(models, settings(), Limits())
    run.open()
    for _ in range(3):
        run.step()
    run.close()
    run.close()
    assert run.trace.stopped
    with pytest.raises(ValueError, match="was closed"):
        run.step()


def test_two_runs_at_once_keep_apart(models: Models, settings: Callable[..., Settings]) -> None:
    prompts = PROMPTS[:2], PROMPTS[2:]
    runs = [Run(models, settings(prompts=tuple(own)), Limits()) for own in prompts]
    for run in runs:
        run.open()
    while not all(run.done for run in runs):
        for run in runs:
            if not run.done:
                run.step()
    for run, own in zip(runs, prompts, strict=True):
        run.close()
        assert [a.tokens for a in run.trace.answers] == generated(models, own, do_sample=False)


def test_the_drafter_itself_stays_as_it_was(models: Models, finished: Callable[..., Run]) -> None:
    before = vars(models.drafter("lookup")).copy()
    finished()
    assert vars(models.drafter("lookup")) == before
    assert models.drafter("lookup").bind.__func__ is PromptLookupDrafter.bind


def test_long_prompts_are_refused_by_number(models: Models, settings: Callable[..., Settings]) -> None:
    with pytest.raises(ValueError, match="prompt 2 has 40 tokens: give 1 to 39"):
        Run(models, settings(prompts=("a", "b" * 40)), Limits(prompt_tokens=39))


def test_unknown_drafter_is_refused(models: Models, settings: Callable[..., Settings]) -> None:
    with pytest.raises(ValueError, match="drafter 'other': choose one of lookup, random"):
        Run(models, settings(drafter="other"), Limits())


def test_trace_is_json(finished: Callable[..., Run]) -> None:
    trace = finished().trace
    content = json.loads(json.dumps(trace.to_dict()))
    assert content["sums"]["tokens"] == trace.tokens
    assert content["settings"]["prompts"] == PROMPTS
    assert content["steps"][0]["rows"][0]["drafts"] is not None
    assert len(content["answers"]) == len(PROMPTS)


def test_gradients_are_not_recorded(models: Models, settings: Callable[..., Settings]) -> None:
    run = Run(models, settings(), Limits())
    run.open()
    with torch.enable_grad():
        run.step()
        run.step()
    assert not any(tensor.requires_grad for tensor in vars(run.engine.cache).values() if isinstance(tensor, Tensor))
    run.close()


def test_public_generate_still_works_beside_it(models: Models) -> None:
    inputs = padded(models, PROMPTS[:2])
    out = hf_dcut.generate(
        models.model, **inputs, assistant_model=models.drafter("lookup"), dcut=0.5, max_new_tokens=8, do_sample=False
    )
    plain = models.model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert torch.equal(out, plain)
