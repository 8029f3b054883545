"""Rounds: blocks of prompts, the order of methods, what is compared with what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from transformers import PreTrainedModel

from hf_dcut.bench import rounds
from hf_dcut.bench.drafter import make_drafter
from hf_dcut.bench.methods import Outcome, Setting
from hf_dcut.bench.rounds import blocks_of, reference_of, rounds_of, run_rounds, warm_up

PROMPTS = [[5 + i, 6 + i] for i in range(10)]


@pytest.mark.parametrize(
    ("count", "batch", "per_slot", "sizes"),
    [
        (32, 1, 1, [4] * 8),
        (32, 4, 2, [8] * 4),
        (33, 8, 2, [16, 17]),
        (32, 16, 1, [16, 16]),
        (40, 32, 1, [40]),
        (4, 1, 1, [4]),
        (2, 1, 1, [2]),
    ],
)
def test_blocks_are_whole_batches(count: int, batch: int, per_slot: int, sizes: list[int]) -> None:
    blocks = blocks_of(count, batch, per_slot)
    assert [block.stop - block.start for block in blocks] == sizes
    assert [block.start for block in blocks] == [sum(sizes[:i]) for i in range(len(sizes))]


def test_every_block_is_measured_equally_often() -> None:
    assert [rounds_of(*pair) for pair in ((1, 3), (2, 3), (8, 3), (4, 4))] == [3, 4, 8, 4]


@pytest.fixture
def setting(make_target: Callable[..., PreTrainedModel]) -> Setting:
    model = make_target("llama", eos_token_id=None)
    return Setting(model, make_drafter("lookup", model), 4, 6, 2)


def test_rounds_of_a_model(setting: Setting) -> None:
    seen: list[str] = []
    methods = ("generate", "plain", "1.0")
    found = list(run_rounds(setting, PROMPTS, methods, 4, progress=seen.append, done={2}))
    assert [entry["round"] for entry in found] == [0, 1, 3]
    assert [entry["prompts"] for entry in found] == [5, 5, 5]
    # Each round begins at another method.
    assert seen == ["generate", "plain", "1.0", "plain", "1.0", "generate", "generate", "plain", "1.0"]
    for entry in found:
        assert list(entry["methods"]) == list(methods)
        for values in entry["methods"].values():
            assert (values["tokens"], values["equal"], values["ties"], values["mismatches"]) == (30, 5, 0, 0)
        assert "stats" not in entry["methods"]["generate"]
        assert entry["methods"]["1.0"]["stats"]["rows"] > 0
    assert len(found[0]["answers"]) == 5


def test_rounds_in_which_ours_take_turns(setting: Setting) -> None:
    methods = ("plain", "generate", "1.0")
    seen: list[str] = []
    found = list(run_rounds(setting, PROMPTS, methods, 2, progress=seen.append, turns="step"))
    assert sorted(seen) == sorted([*methods, *methods])
    for entry in found:
        assert [values["equal"] for values in entry["methods"].values()] == [5] * 3
        assert [values["peak_bytes"] is None for values in entry["methods"].values()] == [True, False, True]


def test_the_warm_up_tells_each_methods_memory(setting: Setting) -> None:
    peaks = warm_up(setting, PROMPTS, ("generate", "plain"))
    assert list(peaks) == ["generate", "plain"]
    assert all(peak is None or peak > 1 << 20 for peak in peaks.values())


def test_a_wrong_answer_is_a_mismatch(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    real = rounds.run

    def wrong(method: str, *arguments: Any) -> Outcome:
        outcome = real(method, *arguments)
        if method == "1.0":
            outcome.sequences[1][2] += 1
        return outcome

    monkeypatch.setattr(rounds, "run", wrong)
    (entry,) = run_rounds(setting, PROMPTS[:4], ("generate", "1.0"), 1)
    values = entry["methods"]["1.0"]
    assert (values["equal"], values["ties"], values["mismatches"]) == (3, 0, 1)
    assert values["margin"] > 1e-9
    assert entry["methods"]["generate"]["mismatches"] == 0


@pytest.mark.parametrize(
    ("method", "methods", "sampled", "reference"),
    [
        ("auto", ("generate", "plain", "auto"), False, "generate"),
        ("auto", ("plain", "auto"), False, "plain"),
        ("auto", ("1.0", "auto"), False, None),
        ("auto", ("generate", "plain", "auto"), True, "plain"),
        ("generate", ("generate", "plain", "auto"), True, None),
    ],
)
def test_what_answers_are_compared_with(
    method: str, methods: Sequence[str], sampled: bool, reference: str | None
) -> None:
    assert reference_of(method, methods, sampled) == reference
