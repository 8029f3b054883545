"""What the tests of the stages share: a batch of requests in columns of small numbers, and a watch on host reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from hf_dcut.types import Batch


def build_batch(
    length: Sequence[int],
    room: Sequence[int] | None = None,
    anchor: Sequence[int] | None = None,
    rope: Sequence[int] = (),
) -> Batch:
    """Returns requests in slots 0, 1, ..: with plenty of room, anchors 50, 51, .. and plain positions by default."""
    rows = len(length)
    columns = (
        range(rows),
        length,
        anchor or range(50, 50 + rows),
        room or [99] * rows,
        range(rows),
        rope or [0] * rows,
    )
    return Batch(*(torch.tensor(list(column), dtype=torch.int64) for column in columns))


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., Batch]:
    """`make_batch(length, room=None, anchor=None, rope=())`, one number a request in each."""
    return build_batch


def greedy_texts(
    model: PreTrainedModel, prompts: Sequence[list[int]], lengths: Sequence[int], end: int
) -> list[list[int]]:
    """Returns what plain `generate` says after each prompt alone, up to its own length or the end token."""
    texts = []
    for prompt, length in zip(prompts, lengths, strict=True):
        inputs = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt))}
        text = model.generate(**inputs, do_sample=False, eos_token_id=end, max_new_tokens=length)
        texts.append(text[0, len(prompt) :].tolist())
    return texts


@pytest.fixture(scope="session")
def said_alone() -> Callable[..., list[list[int]]]:
    """`said_alone(model, prompts, lengths, end)`: the new tokens of each."""
    return greedy_texts


class HostRead(AssertionError):
    """The host asked for a number that the device had to give, or sent it one."""


class _NoReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name.startswith("index") and any(x is not None and x.dtype == torch.bool for x in _tensors(args[1:2]))
        if masks or name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2"):
            raise HostRead(name)
        return func(*args, **(kwargs or {}))


class _NoLists(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("tolist", "numpy", "cpu", "tensor", "as_tensor"):
            raise HostRead(func.__name__)
        return func(*args, **(kwargs or {}))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


@contextmanager
def _without_host_reads() -> Iterator[None]:
    with _NoReads(), _NoLists():
        yield


@pytest.fixture(scope="session")
def no_host_reads() -> Callable[[], AbstractContextManager[None]]:
    """`with no_host_reads():` raises `HostRead` for what a CUDA graph cannot hold."""
    return _without_host_reads


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    """`launch(scenario, model, processes)`: what each process of `launched.py` got."""
    script = Path(__file__).with_name("launched.py")

    def run(scenario: str, model: PreTrainedModel, processes: int) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp(model.config.model_type)
        model.save_pretrained(folder)
        command = [sys.executable, "-P"]
        if processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        # Without PYTHONSAFEPATH the script's folder, tests/hf_dcut, would stand in for the package.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
        command += [str(script), scenario, str(folder), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
        assert done.returncode == 0, done.stderr[-5000:]
        return [json.loads((folder / f"{scenario}-{processes}-{n}.json").read_text()) for n in range(processes)]

    return run
