"""Replicas share a batch job: two processes, and four of which two hold a model each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from accelerate import Accelerator
from transformers import PreTrainedModel

import hf_dcut
from hf_dcut.parallel import Replicas
from hf_dcut.ranks import Ranks

Launch = Callable[..., list[dict[str, Any]]]
JOB = {"prompt_lookup_num_tokens": 3, "dcut": 0.5, "max_new_tokens": 12, "do_sample": True, "progress_bar": False}


@pytest.fixture(scope="module")
def small(make_target: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return make_target("llama", hidden_size=32, intermediate_size=64, num_hidden_layers=1, eos_token_id=[40, 77])


@pytest.fixture(scope="module")
def alone(launch: Launch, small: PreTrainedModel) -> dict[str, Any]:
    (found,) = launch("replicas", small, 1)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "processes"), [("replicas", 2), ("grid", 4)])
def test_results_do_not_depend_on_the_number_of_replicas(
    scenario: str, processes: int, launch: Launch, small: PreTrainedModel, alone: dict[str, Any]
) -> None:
    found = launch(scenario, small, processes)
    shares = [other.pop("share") for other in found]
    assert shares == ([[0, 2, 4, 6], [1, 3, 5]] if processes == 2 else [[0, 2, 4, 6]] * 2 + [[1, 3, 5]] * 2)
    assert all(other == found[0] for other in found)
    for name in ("seeded", "several", "one", "failing"):
        assert found[0][name] == alone[name], name
        assert list(found[0][name]) == list(alone[name]), name
    assert list(found[0]["seeded"]) == [f"req_{n}" for n in range(7)]
    assert found[0]["unseeded"] != alone["unseeded"]
    assert [name for name, error in found[0]["failing"].items() if error] == ["req_2"]


def test_one_process_with_an_accelerator(tiny_llama: Callable[..., PreTrainedModel]) -> None:
    model, prompts = tiny_llama(), [[5, 6, 7], [8], [9, 10]]
    plain, shared = (
        hf_dcut.generate_batch(model, prompts, seed=3, accelerator=accelerator, **JOB)
        for accelerator in (None, Accelerator(cpu=True))
    )
    assert [r.generated_tokens for r in plain.values()] == [r.generated_tokens for r in shared.values()]


def test_something_else_than_an_accelerator(tiny_llama: Callable[..., PreTrainedModel]) -> None:
    with pytest.raises(TypeError, match=r"accelerator is a str: give an accelerate\.Accelerator, or None"):
        hf_dcut.generate_batch(tiny_llama(), [[5]], accelerator="auto", **JOB)


def test_an_accelerator_that_does_not_know_of_the_other_processes(
    tiny_llama: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    split = Ranks()
    split.size = 2
    monkeypatch.setattr(Ranks, "of", classmethod(lambda cls, model: split))
    with pytest.raises(ValueError, match=r"knows of 1 process and the model lies in 2: make the Accelerator before"):
        Replicas(tiny_llama(), Accelerator(cpu=True))


def test_every_nth_input_is_a_replica_s() -> None:
    replicas = Replicas(None)  # type: ignore[arg-type]
    replicas._leaders, shares = [0, 2, 4], []
    for replicas._index in range(3):
        shares.append(replicas.share(range(8)))
    assert shares == [[0, 3, 6], [1, 4, 7], [2, 5]]
