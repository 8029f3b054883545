"""Whatever arrives, ends, is cancelled or loses its slot around a request: its tokens are those it gets alone.

A random schedule drives the engine directly. The truth is computed beforehand, one request at a time: greedy texts by
plain `generate`, sampled ones by plain steps with the same seed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from transformers import GenerationConfig, PreTrainedModel

from hf_dcut import PromptLookupDrafter, generate
from hf_dcut.batch_records import BatchRequest
from hf_dcut.drafters import DFlashDrafter, Drafter
from hf_dcut.engine import Engine
from hf_dcut.intake import Intake
from hf_dcut.requests import Request
from hf_dcut.stats import Stats

SHAPE = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
PROMPTS = [[5, 6, 7, 5, 6], [8], [9, 10, 11, 12, 13, 14, 15, 16, 17], [18, 19, 18, 19, 18, 19]]
END, SLOTS, SEED = 40, 3, 11
KINDS = {
    "one token": GenerationConfig(max_new_tokens=1, do_sample=False),
    "short": GenerationConfig(max_new_tokens=4, do_sample=False),
    "long": GenerationConfig(max_new_tokens=15, do_sample=False, eos_token_id=END),
    "walked": GenerationConfig(max_new_tokens=12, do_sample=False, no_repeat_ngram_size=2, repetition_penalty=1.2),
    "sampled": GenerationConfig(max_new_tokens=12, do_sample=True, temperature=1.5, top_k=0),
}


class World:
    """A model and what it says to each prompt alone, under each kind of options."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.truth: dict[tuple[int, str], list[int]] = {}
        for index, prompt in enumerate(PROMPTS):
            inputs = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt))}
            for kind, config in KINDS.items():
                if config.do_sample:
                    text = generate(model, **inputs, generation_config=config, dcut="none", seed=SEED)
                else:
                    text = model.generate(**inputs, generation_config=config)
                self.truth[index, kind] = text[0, len(prompt) :].tolist()


class Schedule(RuleBasedStateMachine):
    """Callers and accidents around one engine."""

    def __init__(self, world: World, drafter: Drafter | None, budget: float | str):
        super().__init__()
        self.world, self.stack = world, ExitStack()
        dcut = {"budget": budget, "max_prefill_tokens": 4}
        self.intake = Intake(world.model, assistant_model=drafter, dcut=dcut, max_batch_size=SLOTS, max_length=30)
        self.engine: Engine = self.stack.enter_context(self.intake.open_engine(Stats()))
        self.given: dict[str, tuple[int, str]] = {}
        self.submitted = 0

    @property
    def unfinished(self) -> list[Request]:
        return [*self.engine.roster.live, *self.engine.roster.waiting]

    @rule(prompt=st.integers(0, len(PROMPTS) - 1), kind=st.sampled_from(list(KINDS)), priority=st.integers(-1, 1))
    def submit(self, prompt: int, kind: str, priority: int) -> None:
        given = BatchRequest(PROMPTS[prompt], generation_config=KINDS[kind], seed=SEED, priority=priority)
        (request,) = self.intake.requests(given, self.submitted)
        self.submitted += 1
        self.given[request.name] = prompt, kind
        self.engine.roster.add(request)

    @precondition(lambda self: self.engine.busy)
    @rule()
    def step(self) -> None:
        for request in self.engine.step():
            prompt, kind = self.given.pop(request.name)
            assert request.tokens == self.world.truth[prompt, kind]
            assert request.finish_reason == ("eos" if request.tokens[-1] in request.eos else "length")

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = self.unfinished[data.draw(st.integers(0, len(self.unfinished) - 1))]
        self.engine.cancel(request)
        prompt, kind = self.given.pop(request.name)
        assert request.finish_reason == "cancelled"
        assert request.tokens == self.world.truth[prompt, kind][: len(request.tokens)]

    @precondition(lambda self: self.engine.roster.live)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        live = self.engine.roster.live
        self.engine.evict(live[data.draw(st.integers(0, len(live) - 1))])

    def teardown(self) -> None:
        with self.stack:
            while self.engine.busy:
                before = [(len(r.tokens), r.read) for r in self.unfinished]
                self.step()
                assert before != [(len(r.tokens), r.read) for r in self.unfinished], "somebody gets on in every step"
            assert not self.given, "nothing is lost"


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def world(request: pytest.FixtureRequest, make_target: Callable[..., PreTrainedModel]) -> World:
    shape = {**SHAPE, "num_key_value_heads": 1, "eos_token_id": None}
    if request.param == "qwen3_5":
        shape["layer_types"] = ["linear_attention", "full_attention"]
    return World(make_target(request.param, **shape))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "budget"), [("prompt lookup", "none"), ("prompt lookup", 0.5), ("random dflash", 1.0)]
)
def test_requests_are_alone_in_any_schedule(world: World, kind: str, budget: float | str) -> None:
    block = {"taps": [0, 1], "mask_token_id": 3, "block_size": 4, "layers": 1, "dtype": torch.float64}
    drafter = PromptLookupDrafter(3) if kind == "prompt lookup" else DFlashDrafter.random(world.model.config, **block)
    run_state_machine_as_test(
        lambda: Schedule(world, drafter, budget),
        settings=settings(
            max_examples=15,
            stateful_step_count=25,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
