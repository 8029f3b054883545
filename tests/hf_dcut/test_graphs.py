"""Recorded steps: the same texts as without, at every shape, and what happens where there are none.

On a CPU a recorder stands in that replays by calling the function again, so everything but the recording is real.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from hf_dcut import graphs as graphs_module
from hf_dcut.assembly import open_engine
from hf_dcut.config import DCutConfig
from hf_dcut.cost_table import CostTable
from hf_dcut.drafters.base import Drafter
from hf_dcut.drafters.dflash import DFlashDrafter
from hf_dcut.drafters.oracle import BoundOracle, OracleDrafter
from hf_dcut.drafters.prompt_lookup import PromptLookupDrafter
from hf_dcut.fixed_step import FixedRow
from hf_dcut.requests import Request
from hf_dcut.stats import Stats

D, END = 3, 43
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [16, 17], [18, 19, 20, 21], [22], [23, 24, 25, 26, 27]]
LENGTHS = [12, 1, 7, 2, 9, 14, 3]
KINDS = ("prompt lookup", "oracle", "wrong oracle", "dflash")


class HostRead(AssertionError):
    """Something was read on the host that a graph cannot read."""


class NoHostReads(TorchFunctionMode):
    """Raises where a tensor's numbers would be asked for, or its shape depends on them."""

    FORBIDDEN = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "cpu", "numpy", "unique")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self.FORBIDDEN:
            raise HostRead(func.__name__)
        if func is torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in index):
                raise HostRead("mask as an index")
        if getattr(func, "__name__", "") in ("tensor", "as_tensor"):
            raise HostRead("numbers of the host")
        return func(*args, **(kwargs or {}))


@dataclass
class CallAgain:
    """Stands in for CUDA graphs: replays by calling the function, under the rules of a recording."""

    fail: Callable[[int], Exception | None] = lambda number: None
    strict: bool = True
    recorded: int = 0
    replays: list[int] = field(default_factory=list)

    def record(self, run: Callable[[], FixedRow]) -> Callable[[], FixedRow]:
        error = self.fail(self.recorded)
        self.recorded += 1
        if error is not None:
            raise error
        first = run()

        def replay() -> FixedRow:
            with NoHostReads() if self.strict else nullcontext():
                row = run()
            assert row.logits.data_ptr() == first.logits.data_ptr()
            self.replays.append(len(row.packed))
            return row

        return replay

    def bytes(self) -> int:
        return 0


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> CallAgain:
    """Takes the place of CUDA's, on the CPU."""
    stand_in = CallAgain()
    monkeypatch.setattr(graphs_module, "recorder_for", lambda device: stand_in)
    # It reads its own table on the host when it meets a request, which a real recording could not hold.
    monkeypatch.setattr(BoundOracle, "capturable", True)
    return stand_in


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return tiny_llama(eos_token_id=None)


@pytest.fixture(scope="module")
def texts(model: PreTrainedModel) -> list[list[int]]:
    """What plain `generate` says after each prompt alone."""
    texts = []
    for prompt, length in zip(PROMPTS, LENGTHS, strict=True):
        inputs = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt))}
        text = model.generate(**inputs, do_sample=False, eos_token_id=END, max_new_tokens=length)
        texts.append(text[0, len(prompt) :].tolist())
    return texts


def make_drafter(kind: str, model: PreTrainedModel, texts: Sequence[Sequence[int]]) -> Drafter | None:
    shape = {"taps": [0, 2], "mask_token_id": 3, "block_size": D + 1, "layers": 2, "dtype": torch.float64}
    known = {tuple(p): list(t) for p, t in zip(PROMPTS, texts, strict=True)}
    return {
        "none": lambda: None,
        "prompt lookup": lambda: PromptLookupDrafter(D),
        "oracle": lambda: OracleDrafter(known, D, (0.1, 0.7, 1.0)),
        "wrong oracle": lambda: OracleDrafter(known, D, (0.0,)),
        "dflash": lambda: DFlashDrafter.random(model.config, **shape),
    }[kind]()


def make_requests(**options: Any) -> list[Request]:
    pairs = zip(PROMPTS, LENGTHS, strict=True)
    return [Request(i, p, n, frozenset({END}), **options) for i, (p, n) in enumerate(pairs)]


def costs() -> CostTable:
    rows = {b: {0: 1.0, b: 1.1, 2 * b: 1.2, 3 * b: 1.5, 4 * b: 2.0} for b in (1, 2, 4, 8)}
    return CostTable.from_rows(rows, D)


def run(model: PreTrainedModel, drafter: Drafter | None, slots: int, requests: list[Request], **options: Any) -> Stats:
    values = {"budget": 0.5, "cuda_graphs": True, "deterministic": True, "cost_table": costs(), **options}
    prompt, longest = max(map(len, PROMPTS)), max(len(p) + n for p, n in zip(PROMPTS, LENGTHS, strict=True))
    with open_engine(model, drafter, DCutConfig(**values), slots, prompt, longest, Stats(records=[])) as engine:
        assert sorted(request.id for request in engine.run(requests)) == list(range(len(requests)))
        return engine.stats


@pytest.mark.parametrize("kind", ["none", *KINDS])
@pytest.mark.parametrize(("slots", "at_once"), [(1, 4096), (3, 1), (7, 4096), (9, 4096)])
def test_every_text_is_plain_generates(
    recorder: CallAgain, model: PreTrainedModel, texts: list[list[int]], kind: str, slots: int, at_once: int
) -> None:
    recorder.strict = "oracle" not in kind
    requests = make_requests()
    stats = run(model, make_drafter(kind, model, texts), slots, requests, max_prefill_tokens=at_once)
    assert [request.tokens for request in requests] == texts
    assert recorder.replays
    assert sum(request.totals.kept for request in requests) == stats.kept
    assert sum(request.totals.accepted for request in requests) == stats.accepted_tokens
