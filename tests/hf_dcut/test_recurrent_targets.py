"""Targets with Gated DeltaNet layers say exactly what they say alone, whatever runs beside a request.

Each request is compared with plain `generate` of that request alone: float64, in which such models keep float32 for
norms and the delta rule, so that packed rows differ by about 1e-6 and the likeliest token does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_dcut import OracleDrafter, generate_batch
from hf_dcut.assembly import open_engine
from hf_dcut.config import DCutConfig
from hf_dcut.drafters import DFlashDrafter, Drafter
from hf_dcut.memory import fitting_length, fitting_slots, slot_bytes
from hf_dcut.requests import Request
from hf_dcut.stats import Stats
from hf_dcut.target import Target

KINDS = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
D, NEW = 4, 16
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW}
PROMPTS = [torch.randint(3, 101, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(1, 16, 2)]
Builder = Callable[..., PreTrainedModel]


class World:
    """A model of each kind and what it says to each prompt alone."""

    def __init__(self, make_target: Builder):
        self.make_target = make_target
        self.models: dict[str, PreTrainedModel] = {}
        self.said: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def model(self, kind: str) -> PreTrainedModel:
        if kind not in self.models:
            self.models[kind] = self.make_target(kind, hidden_size=32, intermediate_size=32, eos_token_id=None)
        return self.models[kind]

    def alone(self, kind: str, prompt: Sequence[int]) -> list[int]:
        key = kind, tuple(prompt)
        if key not in self.said:
            ids = torch.tensor([prompt])
            text = self.model(kind).generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
            self.said[key] = text[0, len(prompt) :].tolist()
        return self.said[key]

    def drafter(self, name: str, kind: str) -> Drafter:
        model = self.model(kind)
        if name == "random dflash":
            shape = {"taps": [0, 1], "mask_token_id": 3, "block_size": D + 1, "layers": 1, "dtype": model.dtype}
            return DFlashDrafter.random(model.config, **shape)
        profile = {"oracle": (0.2, 0.6, 1.0), "sure oracle": (1.0,)}[name]
        return OracleDrafter({tuple(p): self.alone(kind, p) for p in PROMPTS}, D, profile)


@pytest.fixture(scope="module")
def world(make_target: Builder) -> World:
    return World(make_target)


def padded(prompts: Sequence[list[int]]) -> dict[str, torch.Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "drafter", "budget"),
    [
        *((1, "random dflash", 1.0), (1, "oracle", 0.5), (3, "random dflash", 0.5), (3, "oracle", 1.0)),
        *((8, "random dflash", 0.5), (8, "oracle", 0.5), (8, "oracle", 1.0), (8, "sure oracle", 0.75)),
    ],
)
def test_generate(world: World, kind: str, rows: int, drafter: str, budget: float) -> None:
    inputs = padded(PROMPTS[-rows:])
    options = {"assistant_model": world.drafter(drafter, kind), "dcut": budget, "return_dict_in_generate": True}
    output = world.model(kind).generate(**inputs, **options, **GREEDY)
    said = output.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    assert said == [world.alone(kind, prompt) for prompt in PROMPTS[-rows:]]
    assert output.stats.drafted > 0
    assert (output.stats.accepted_tokens > 0) or drafter == "random dflash"


def test_generate_chooses_budgets_itself(world: World) -> None:
    inputs = padded(PROMPTS)
    text = world.model("qwen3_5").generate(
        **inputs, assistant_model=world.drafter("oracle", "qwen3_5"), dcut=True, **GREEDY
    )
    assert text[:, -NEW:].tolist() == [world.alone("qwen3_5", prompt) for prompt in PROMPTS]


def test_prompt_lookup_and_plain_steps(world: World) -> None:
    for options in ({"prompt_lookup_num_tokens": 3, "dcut": 1.0}, {"dcut": "none"}):
        text = world.model("qwen3_5").generate(**padded(PROMPTS), **options, **GREEDY)
        assert text[:, -NEW:].tolist() == [world.alone("qwen3_5", prompt) for prompt in PROMPTS]


def test_prompt_lookup_in_a_batch_job(world: World) -> None:
    model, both = world.model("qwen3_5"), {"assistant_model": world.drafter("random dflash", "qwen3_5"), "dcut": 1.0}
    results = generate_batch(model, PROMPTS, prompt_lookup_num_tokens=3, progress_bar=False, **both, **GREEDY)
    assert [r.generated_tokens for r in results.values()] == [world.alone("qwen3_5", prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("drafter", "slots"), [("random dflash", 3), ("oracle", 2), ("sure oracle", 8)])
def test_generate_batch(world: World, kind: str, drafter: str, slots: int) -> None:
    dcut = {"budget": 0.75, "max_prefill_tokens": 5}
    options = {"assistant_model": world.drafter(drafter, kind), "dcut": dcut, "max_batch_size": slots}
    results = generate_batch(world.model(kind), PROMPTS, progress_bar=False, **options, **GREEDY)
    said = [results[f"req_{n}"].generated_tokens for n in range(len(PROMPTS))]
    assert said == [world.alone(kind, prompt) for prompt in PROMPTS]


# What happens to slots.


def requests_of(prompts: Sequence[list[int]]) -> list[Request]:
    return [Request(id=n, prompt=prompt, max_new_tokens=NEW) for n, prompt in enumerate(prompts)]


def engine_of(world: World, slots: int, reading: int = 2048) -> Any:
    drafter = world.drafter("oracle", "qwen3_5")
    config = DCutConfig(budget=0.75, max_prefill_tokens=reading)
    return open_engine(world.model("qwen3_5"), drafter, config, slots, 15, 15 + NEW, Stats())


@pytest.mark.parametrize("reading", [2048, 4, 1])
def test_equal_prompts_that_come_together_are_read_once(world: World, reading: int) -> None:
    prompt, other = PROMPTS[4], PROMPTS[2]
    requests = requests_of([prompt, other, prompt, prompt])
    with engine_of(world, slots=4, reading=reading) as engine:
        for request in engine.run(requests):
            assert request.tokens == world.alone("qwen3_5", request.prompt)
        assert engine.stats.shared_tokens == 2 * (len(prompt) - 1)
        assert engine.stats.prompt_tokens == len(prompt) + 2 + len(other)


def test_a_state_that_went_on_is_not_copied(world: World) -> None:
    first, second = requests_of([PROMPTS[4], PROMPTS[4]])
    with engine_of(world, slots=2) as engine:
        engine.roster.add(first)
        engine.step()
        engine.roster.add(second)
        for request in [*engine.run([])]:
            assert request.tokens == world.alone("qwen3_5", request.prompt)
        assert engine.stats.shared_tokens == 0
        assert engine.stats.prompt_tokens == 2 * len(PROMPTS[4])


def test_requests_that_lose_their_slots_go_on_as_if_nothing_had_happened(world: World) -> None:
    requests = requests_of([*PROMPTS[2:6], PROMPTS[4]])
    with engine_of(world, slots=3, reading=4) as engine:
        for request in requests:
            engine.roster.add(request)
        done, steps = [], 0
        while engine.busy:
            done += engine.step()
            steps += 1
            if steps % 3 == 0 and engine.roster.live and engine.stats.evictions < 8:
                engine.evict(engine.roster.live[steps % len(engine.roster.live)])
        assert engine.stats.evictions > 3
        assert sorted(request.id for request in done) == list(range(5))
        assert all(request.tokens == world.alone("qwen3_5", request.prompt) for request in done)


def test_a_step_that_did_not_fit_into_memory_is_done_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, forward, calls = requests_of(PROMPTS[:5]), Target.forward, []

    def failing(self: Target, *args: Any) -> Any:
        output = forward(self, *args)
        calls.append(len(args[0]))
        if len(calls) in (1, 4, 5):
            raise torch.OutOfMemoryError("made up, after all layers")
        return output

    with engine_of(world, slots=5, reading=8) as engine:
        monkeypatch.setattr(Target, "forward", failing)
        done = [*engine.run(requests)]
        assert len(done) == 5
        assert all(request.tokens == world.alone("qwen3_5", request.prompt) for request in done)
        assert engine.stats.evictions > 0


def test_freed_slots_hold_the_first_state(world: World) -> None:
    with engine_of(world, slots=3) as engine:
        done = [*engine.run(requests_of(PROMPTS))]
        assert len(done) == len(PROMPTS)
        for layer in engine.cache.states:
            assert not layer.state.any()
            assert not layer.window.any()


def test_slots_and_lengths_that_fit_into_memory(world: World) -> None:
    target = Target(world.model("qwen3_5"))
    one, two = (slot_bytes(target, None, length) for length in (10, 20))
    assert slot_bytes(target, None, 0) == 2 * one - two > 0, "states, whatever the length"
    assert fitting_slots(target, None, 9, 20, limit=3 * two) == 3
    assert fitting_slots(target, None, 9, 20, limit=3 * two - 1) == 2
    assert fitting_length(target, None, limit=two) == 20
    assert fitting_length(target, None, limit=two - 1) == 19
