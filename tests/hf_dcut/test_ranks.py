"""Tensor parallelism in two processes on CPUs (gloo): the same tokens in both, which are those of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel, StoppingCriteriaList
from transformers.generation import MaxTimeCriteria

from hf_dcut.ranks import Ranks, settings
from hf_dcut.target import Target

SCRIPT = Path(__file__).with_name("launched.py")
Launch = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def two(request: pytest.FixtureRequest, launch: Launch, make_target: Callable[..., PreTrainedModel]) -> Any:
    """What two processes and one got of the same model."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "eos_token_id": [40, 77]}
    model = make_target(request.param, **sizes)
    return launch("together", model, 2), launch("together", model, 1)[0]


@pytest.mark.slow
def test_two_processes_say_what_one_says(two: Any) -> None:
    (first, second), alone = two
    assert first["equal"] == second["equal"]
    assert first["equal"] == alone["equal"]
    assert all(len(set(map(str, rows))) > 2 for rows in first["equal"].values())
    # Requests end one after the other, so that the batch has many sizes.
    assert len({len([t for t in row if t]) for row in first["equal"]["sampled"]}) > 2


@pytest.mark.slow
def test_what_chance_and_clocks_decide_is_decided_once(two: Any) -> None:
    (first, second), alone = two
    for name in ("sampled", "tossed", "timed", "batch"):
        assert first["own"][name] == second["own"][name], name
    assert first["own"]["sampled"] == alone["own"]["sampled"], "the first process draws the seeds"
    # The first process's coin ends requests at their fourth token, the second's at their first.
    assert [len([token for token in row if token]) for row in first["own"]["tossed"]] == [4] * 5


@pytest.mark.slow
def test_costs_are_measured_together_and_kept_apart_from_those_of_one(two: Any) -> None:
    (first, second), alone = two
    assert first["own"]["seconds"] == second["own"]["seconds"]
    assert (first["own"]["processes"], alone["own"]["processes"]) == (2, 1)
    assert first["own"]["written"] == [True, False]


@pytest.mark.slow
def test_slots_hold_the_heads_of_this_process(two: Any) -> None:
    (first, second), alone = two
    assert first["own"]["heads"] == second["own"]["heads"] == [1, 1]
    assert alone["own"]["heads"] == [2, 2]


@pytest.mark.slow
def test_what_differs_between_processes_is_named_in_both(two: Any) -> None:
    (first, second), _ = two
    told = first["own"]["refused"]
    assert told == second["own"]["refused"]
    assert "input_ids: process 0 has [[5, 6, 7]], process 1 has [[5, 6, 8]]. Call with the same" in told["prompts"]
    assert "dcut: process 0 has {'budget': 0.5}, process 1 has {'budget': 0.75}" in told["budget"]
    assert "cost_table: process 0 has (3, {0: {1: {0: 1.0" in told["tables"]
    assert "inputs: process 0 has [([5],), ([6],)], process 1 has [([5],), ([7],)]" in told["inputs"]
    assert "generation_config: process 0 has {'min_length': 4, 'min_new_tokens': 1}, process 1" in told["options"]
    assert "hf_dcut: process 0 has '0', process 1 has '1'" in told["versions"]
    assert "use generate_batch or iterate_batch" in told["manager"]
    assert "whose process group is gone" in told["group"]


@pytest.mark.slow
def test_heads_that_cannot_be_split(launch: Launch, make_target: Callable[..., PreTrainedModel]) -> None:
    model = make_target("llama", num_key_value_heads=1, num_hidden_layers=1)
    for told in launch("uneven", model, 2):
        assert (
            "tp_size=2 does not divide num_key_value_heads=1 of LlamaForCausalLM: give a tp_size that"
            in told["refused"]
        )


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["dies", "stalls"])
def test_a_process_that_is_lost_ends_the_others(
    fault: str, tmp_path: Path, make_target: Callable[..., PreTrainedModel]
) -> None:
    make_target("llama", num_hidden_layers=1, eos_token_id=None).save_pretrained(tmp_path)
    # Without a launcher, which would end the first process itself.
    both = [
        subprocess.Popen(
            [sys.executable, "-P", SCRIPT, fault, tmp_path, tmp_path],
            env=os.environ | {"PYTHONSAFEPATH": "1", "RANK": str(rank), "WORLD_SIZE": "2"},
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        _, errors = both[0].communicate(timeout=200)
        assert both[0].returncode == 0, errors.decode()[-3000:]
    finally:
        for process in both:
            process.kill()
            process.communicate()
    told = json.loads((tmp_path / f"{fault}-2-0.json").read_text())
    # The group's timeout is 6 seconds; a broken connection is noticed at once.
    assert told["seconds"] < 30
    assert told["error"]


def test_one_process_agrees_with_itself() -> None:
    ranks, tensor = Ranks(), torch.arange(3)
    assert ranks.agree(tensor)[0] is tensor
    assert (ranks.number(0.1), ranks.least(7), ranks.share(lambda: "x")) == (0.1, 7, "x")
    begin = time.perf_counter()
    assert begin <= ranks.clock() <= time.perf_counter()
    ranks.check({"anything": object()})
    criteria = StoppingCriteriaList([MaxTimeCriteria(1.0)])
    assert ranks.agreed(criteria) is criteria


class Pair(Ranks):
    """Two processes of which the other says the same."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 2

    def agree(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensors

    def least(self, value: int) -> int:
        return value - 1

    def check(self, facts: Mapping[str, object]) -> None: ...


@pytest.fixture
def pair(tiny_llama: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """A model that two processes seem to hold."""
    monkeypatch.setattr(Ranks, "of", classmethod(lambda cls, model: Pair()))
    return tiny_llama()


def test_what_one_process_cannot_go_on_from_alone_is_raised(
    pair: PreTrainedModel, stub_drafter: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(batch: Any) -> Any:
        raise RuntimeError("a drafter's own")

    prompts = torch.tensor([[5, 6, 7], [8, 9, 10]])
    options = {"dcut": 0.5, "do_sample": False, "max_new_tokens": 4}
    with pytest.raises(RuntimeError, match="a drafter's own"):
        pair.generate(prompts, assistant_model=stub_drafter(3, fail), **options)

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Target, "forward", full)
    with pytest.raises(torch.OutOfMemoryError) as told:
        pair.generate(prompts, prompt_lookup_num_tokens=3, **options)
    assert "cannot go back: lower max_batch_size" in "".join(told.value.__notes__)


def test_two_processes_share_the_memory_of_a_cpu(pair: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    class Free:
        available = 1000

    monkeypatch.setattr("psutil.virtual_memory", Free)
    with pytest.raises(MemoryError, match="but 499 bytes are free on cpu"):
        pair.generate(torch.tensor([[5]]), dcut="none", do_sample=False, max_new_tokens=40)


def test_a_whole_model_is_of_one_process(tiny_llama: Callable[..., PreTrainedModel]) -> None:
    ranks = Ranks.of(tiny_llama())
    assert (ranks.size, ranks.index, ranks.leader) == (1, 0, 0)


def test_settings_are_what_prints_alike_everywhere() -> None:
    assert settings({"top_k": 3, "_hidden": 1, "thing": object(), "name": "x", "off": False}) == {
        "name": "x", "off": False, "top_k": 3
    }  # fmt: skip
    assert settings(None) == {}


@pytest.mark.parametrize(("names", "told"), [(("fsdp",), r"\['fsdp'\]"), (None, r"\['unnamed'\]")])
def test_weights_that_are_split_otherwise(
    tiny_llama: Callable[..., PreTrainedModel], names: tuple[str] | None, told: str
) -> None:
    model = tiny_llama()
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = distributed.init_device_mesh("cpu", (2,), mesh_dim_names=names)
        model.lm_head.weight = nn.Parameter(distribute_tensor(model.lm_head.weight.detach(), mesh, [Shard(0)]))
        with pytest.raises(
            ValueError, match=rf"mesh dimensions {told}: dcut runs whole models.*DistributedConfig\(tp_size=N\)"
        ):
            model.generate(torch.tensor([[5]]), prompt_lookup_num_tokens=3, dcut=0.5)
    finally:
        distributed.destroy_process_group()
