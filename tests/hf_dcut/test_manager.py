"""Submitting, cancelling and waiting from other threads; every trouble reaches a caller."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from hf_dcut import BatchManager, PromptLookupDrafter, QueueFull, iterate_batch
from hf_dcut.target import Target

LIMIT = 60  # seconds within which anything here must have happened


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return tiny_llama(eos_token_id=None)


def make(model: PreTrainedModel, **changes: Any) -> BatchManager:
    arguments: dict[str, Any] = {
        "assistant_model": PromptLookupDrafter(3),
        "dcut": 0.5,
        "max_batch_size": 3,
        "max_length": 60,
        "max_new_tokens": 6,
        "do_sample": False,
    }
    return BatchManager(model, **{**arguments, **changes})


def answer(model: PreTrainedModel, prompt: list[int], new: int = 6) -> list[int]:
    (result,) = iterate_batch(model, [prompt], dcut="none", max_new_tokens=new, do_sample=False)
    return result.generated_tokens


class Gate(LogitsProcessor):
    """Holds the worker in a request's first token until it is opened."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.entered.set()
        assert self.open.wait(LIMIT)
        return scores

    @property
    def processors(self) -> LogitsProcessorList:
        return LogitsProcessorList([self])


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


def test_threads_submit_and_wait_for_their_own(model: PreTrainedModel) -> None:
    prompts = [[5 + n, 6, 5 + n] for n in range(16)]
    with make(model) as manager, ThreadPoolExecutor(4) as threads:

        def ask(prompt: list[int]) -> list[int]:
            return manager.get_result(manager.add_request(prompt), timeout=LIMIT).generated_tokens

        assert list(threads.map(ask, prompts)) == [answer(model, prompt) for prompt in prompts]
    assert not manager.is_running()
    assert manager.stats.new_tokens == 16 * 6


def test_results_as_they_come(model: PreTrainedModel) -> None:
    with make(model) as manager:
        ids = manager.add_requests([[5], [6], [7], [8]])
        assert ids == ["req_0", "req_1", "req_2", "req_3"]
        taken = [manager.get_result(timeout=LIMIT).request_id, manager.get_result(timeout=LIMIT).request_id]
        manager.stop(block=False)
        taken += [result.request_id for result in manager]
    assert sorted(taken) == ids


def test_leaving_finishes_what_was_submitted(model: PreTrainedModel) -> None:
    with make(model) as manager:
        manager.add_requests([[5], [6], [7], [8]])
    assert sorted(r.request_id for r in manager) == ["req_0", "req_1", "req_2", "req_3"]


def test_fields_of_a_request(model: PreTrainedModel) -> None:
    config = GenerationConfig(max_new_tokens=3, do_sample=True, num_return_sequences=2)
    with make(model) as manager:
        assert manager.add_request([5], "mine", generation_config=config, seed=1, priority=2) == "mine"
        assert len(manager.get_result("mine", LIMIT).generated_tokens) == 3
        assert manager.get_result("mine__child#0", LIMIT).finish_reason == "length"
        with pytest.raises(TypeError, match="prioritty"):
            manager.add_request([5], prioritty=2)
        with pytest.raises(ValueError, match="hold 1000"):
            manager.add_request([1000])
        with pytest.raises(ValueError, match="max_length=60"):
            manager.add_request([5] * 60)
        assert manager.get_result(manager.add_request([6]), LIMIT).generated_tokens == answer(model, [6])


def test_a_cancelled_request_frees_its_slot(model: PreTrainedModel, gate: Gate) -> None:
    with make(model, max_batch_size=1) as manager:
        manager.add_request([5], "long", logits_processor=gate.processors)
        waits = manager.add_request([6])
        never = manager.add_request([7])
        assert gate.entered.wait(LIMIT)
        manager.cancel_request("long")
        manager.cancel_request(never)
        gate.open.set()
        cancelled = manager.get_result("long", LIMIT)
        assert (cancelled.finish_reason, cancelled.error) == ("cancelled", None)
        assert cancelled.generated_tokens == answer(model, [5], len(cancelled.generated_tokens)) != []
        assert manager.get_result(never, LIMIT).generated_tokens == []
        assert manager.get_result(waits, LIMIT).generated_tokens == answer(model, [6])
        done = manager.add_request([8])
        assert manager.get_result(done, LIMIT).finish_reason == "length"
        with pytest.raises(ValueError, match="no such request"):
            manager.cancel_request(done)


def test_a_full_queue(model: PreTrainedModel, gate: Gate) -> None:
    with make(model, max_batch_size=1, max_queue=2) as manager:
        manager.add_request([5], logits_processor=gate.processors)
        assert gate.entered.wait(LIMIT)
        manager.add_requests([[6], [7]])
        for timeout in (0, 0.05):
            with pytest.raises(QueueFull, match="max_queue=2 requests wait already"):
                manager.add_request([8], timeout=timeout)
        late = threading.Thread(target=manager.add_request, args=([9], "late"))
        late.start()
        gate.open.set()
        late.join(LIMIT)
        assert not late.is_alive(), "it got its place once there was one"
        assert manager.get_result("late", LIMIT).generated_tokens == answer(model, [9])


def test_waiting_in_vain(model: PreTrainedModel, gate: Gate) -> None:
    with make(model) as manager:
        with pytest.raises(ValueError, match="request_id='nobody'"):
            manager.get_result("nobody")
        name = manager.add_request([5], logits_processor=gate.processors)
        with pytest.raises(TimeoutError, match=r"req_0 has not ended within 0\.01 s"):
            manager.get_result(name, timeout=0.01)
        with pytest.raises(ValueError, match="request_id='req_0' is taken"):
            manager.add_request([6], "req_0")
        gate.open.set()
        manager.get_result(name, LIMIT)
        with pytest.raises(ValueError, match="was taken already"):
            manager.get_result(name)
    with pytest.raises(RuntimeError, match="no result will come any more"):
        manager.get_result()
    with pytest.raises(RuntimeError, match="takes no requests any more"):
        manager.add_request([5])
    with pytest.raises(RuntimeError, match="started before"):
        manager.start()
    assert list(manager) == []


def test_stopping_hard_cancels(model: PreTrainedModel, gate: Gate) -> None:
    manager = make(model, max_batch_size=1)
    manager.start()
    names = [manager.add_request([5], logits_processor=gate.processors), *manager.add_requests([[6], [7]])]
    assert gate.entered.wait(LIMIT)
    with pytest.raises(TimeoutError, match=r"requests have not ended within 0\.01 s"):
        manager.stop(timeout=0.01)
    manager.stop(block=False, hard_stop=True)
    gate.open.set()
    manager.stop(timeout=LIMIT)
    assert [manager.get_result(name).finish_reason for name in names] == ["cancelled"] * 3


def test_an_exception_in_the_callers_block_cancels(model: PreTrainedModel) -> None:
    manager = make(model, max_new_tokens=50)

    def interrupted() -> None:
        with manager:
            manager.add_requests([[5]] * 30)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not manager.is_running()
    assert {result.finish_reason for result in manager} <= {"cancelled", "length"}
    assert not any(module._forward_hooks for module in model.modules())


def test_an_error_in_the_thread_reaches_every_caller(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = threading.Event()
    forward = Target.forward

    def fail(self: Target, packed: Any, cache: Any) -> Any:
        if broken.is_set():
            raise OSError("the device fell off the bus")
        return forward(self, packed, cache)

    monkeypatch.setattr(Target, "forward", fail)
    manager = make(model)
    manager.start()
    good = manager.add_request([5])
    while good not in manager._results:
        time.sleep(0.01)
    broken.set()
    with ThreadPoolExecutor(2) as threads:
        lost = manager.add_request([6])
        waits = [threads.submit(manager.get_result, lost, LIMIT), threads.submit(manager.get_result, lost)]
        for wait in waits:
            with pytest.raises(RuntimeError, match="no result will come any more") as info:
                wait.result(LIMIT)
            assert isinstance(info.value.__cause__, OSError)
    assert manager.get_result(good).generated_tokens == answer_before(monkeypatch, model)
    for verb in (manager.stop, lambda: next(iter(manager))):
        with pytest.raises(RuntimeError, match="fell off the bus"):
            verb()
    with pytest.raises(RuntimeError, match="takes no requests") as info:
        manager.add_request([5])
    assert isinstance(info.value.__cause__, OSError)


def answer_before(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> list[int]:
    monkeypatch.undo()
    return answer(model, [5])


def test_a_failure_is_raised_on_leaving(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Target, packed: Any, cache: Any) -> Any:
        raise OSError("the device fell off the bus")

    monkeypatch.setattr(Target, "forward", fail)
    with pytest.raises(RuntimeError, match="fell off the bus"), make(model) as manager:
        manager.add_request([5])


def test_bad_settings(model: PreTrainedModel) -> None:
    for name in ("max_queue", "max_length", "max_batch_size"):
        with pytest.raises(ValueError, match=f"{name}=0"):
            make(model, **{name: 0})
    manager = make(model)
    manager.add_request([5])
    manager.stop()
    with pytest.raises(RuntimeError, match="no result will come"):
        manager.get_result("req_0")
