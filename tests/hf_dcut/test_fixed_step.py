"""The first half of a step at a given shape: it reads nothing on the host, and leaves what is anybody's alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import PreTrainedModel

from hf_dcut import attention
from hf_dcut.acceptance import accept
from hf_dcut.cache import SlotCache
from hf_dcut.drafters.best_of import BestOf
from hf_dcut.drafters.dflash import DFlashDrafter
from hf_dcut.drafters.prompt_lookup import PromptLookupDrafter
from hf_dcut.fixed_step import FixedRow, FixedStep
from hf_dcut.packing import pack_plain
from hf_dcut.selecting import select_fixed
from hf_dcut.target import Target
from hf_dcut.types import Batch, Drafts

B, D, CELLS = 4, 3, 32
SHAPES = [(b, t) for b in (1, 2, B) for t in (0, b, 2 * b + 1, b * (D + 1))]
NoHostReads = Callable[[], AbstractContextManager[None]]


@pytest.fixture(scope="module")
def make_model(make_target: Callable[..., PreTrainedModel]) -> Callable[[torch.dtype], PreTrainedModel]:
    """Models with full and sliding layers, one a dtype."""
    sliding = {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 4}
    return cache(lambda dtype: make_target("qwen3", dtype, use_sliding_window=True, max_window_layers=0, **sliding))


@contextmanager
def open_step(model: PreTrainedModel, kind: str) -> Iterator[FixedStep]:
    options = {"taps": [0, 2], "mask_token_id": 3, "block_size": D + 1, "layers": 2, "dtype": model.dtype}
    lookup, block = PromptLookupDrafter(D), DFlashDrafter.random(model.config, **options)
    drafter = {"prompt lookup": lookup, "dflash": block, "best of": BestOf([block, lookup])}[kind]
    with Target(model, drafter.taps) as target:
        slots = SlotCache(target.shapes, B, CELLS, target.dtype, target.device)
        yield FixedStep(target, slots, drafter.bind(model, B, CELLS), D)


@pytest.fixture(params=["prompt lookup", "dflash", "best of"])
def step(request: pytest.FixtureRequest, make_model: Callable[[torch.dtype], PreTrainedModel]) -> Iterator[FixedStep]:
    with open_step(make_model(torch.float64), request.param) as opened:
        yield opened


def filled(step: FixedStep, rows: int, live: int | None = None) -> torch.Tensor:
    """Returns columns of requests that stand somewhere in their slots, and of empty ones from `live` on."""
    columns, live = step.inputs(rows), rows if live is None else live
    columns[1, :live] = torch.tensor([5, 9, 0, 7])[:live]
    columns[2, :live] = torch.tensor([11, 12, 13, 14])[:live]
    columns[3, :live] = torch.tensor([9, 1, 2, 0])[:live]
    return columns


def largest_first(step: FixedStep) -> FixedRow:
    return step(filled(step, B), B * (D + 1))


@pytest.mark.parametrize(("rows", "total"), SHAPES)
def test_nothing_is_read_on_the_host(step: FixedStep, no_host_reads: NoHostReads, rows: int, total: int) -> None:
    largest_first(step)
    columns = filled(step, rows)
    expected = step(columns, total).logits.clone()
    with no_host_reads():
        row = step(columns, total)
    assert torch.equal(row.logits, expected)
    assert len(row.packed) == len(row.logits) == (total or rows)
    assert row.packed.start[-1] == (total or rows), "every place is somebody's"


def test_drafting_apart_and_the_rest_behind_it_are_the_whole_step(step: FixedStep, no_host_reads: NoHostReads) -> None:
    largest_first(step)
    columns, drafts = filled(step, B), step.blank(B)
    whole = step(columns, 9)
    logits, token = whole.logits.clone(), whole.packed.token
    menu = torch.tensor([[B, 9, 16], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    with no_host_reads():
        best = step.draft(columns, menu, drafts)
        row = step(columns, 9, drafts)
    assert best.shape == (1,)
    assert torch.equal(row.packed.token, token)
    assert torch.equal(row.logits, logits)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x.any()),
        lambda x: int(x.max()),
        lambda x: x.nonzero(),
        lambda x: x[x > 1],
        lambda x: x.masked_select(x > 1),
        lambda x: x.cpu(),
        lambda x: range(x[0]),
        lambda x: torch.tensor([1, 2]),
        lambda x: x.clone().index_put_((x > 1,), x[0]),
        lambda x: x.unique(),
    ],
)
def test_the_watch_finds_host_reads(no_host_reads: NoHostReads, read: Callable[[torch.Tensor], Any]) -> None:
    numbers = torch.tensor([1, 2, 3])
    read(numbers)
    with pytest.raises(AssertionError), no_host_reads():
        read(numbers)


@pytest.mark.parametrize(("rows", "total"), SHAPES)
def test_shapes_depend_on_nothing_but_the_shape(step: FixedStep, rows: int, total: int) -> None:
    check_shapes(step, rows, total)


@pytest.mark.parametrize("kind", ["prompt lookup", "dflash"])
@pytest.mark.parametrize("path", ["triton", "varlen"])
def test_nor_do_they_on_the_kernels_of_a_gpu(
    make_model: Callable[[torch.dtype], PreTrainedModel], kind: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as their fakes tell."""
    pytest.importorskip("triton")
    with open_step(make_model(torch.bfloat16), kind) as step:
        monkeypatch.setattr(attention, "attention_path", lambda *given: path)
        monkeypatch.setattr("hf_dcut.kernels.select_path", lambda *given: "triton")
        monkeypatch.setattr("hf_dcut.kernels.paths.argmax_path", lambda *given: "triton")
        for rows, total in ((B, B * (D + 1)), (2, 5), (1, 0)):
            check_shapes(step, rows, total)


def check_shapes(step: FixedStep, rows: int, total: int) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        columns, drafts = step.inputs(rows), step.blank(rows)
        best = step.draft(columns, torch.ones(3, 4, dtype=torch.float64), drafts)
        row, apart = step(columns, total), step(columns, total, drafts)
    assert isinstance(best, FakeTensor)
    assert best.shape == (1,)
    assert apart.logits.shape == row.logits.shape
    assert isinstance(row.logits, FakeTensor)
    assert row.logits.shape == (total or rows, step.target.vocabulary)
    assert row.packed.token.shape == (total or rows,)
    assert row.told is None if total == 0 else row.told.shape == (rows, D + 1)


def test_the_whole_step_is_one_graph(step: FixedStep) -> None:
    largest_first(step)

    def run(columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        row = step(columns, 9)
        return row.logits, row.packed.token

    graph = make_fx(run)(step.inputs(B))
    columns = filled(step, B)
    # Another step than the one it was traced on.
    expected = [x.clone() for x in run(columns)]
    for found, wanted in zip(graph(columns), expected, strict=True):
        assert torch.equal(found, wanted)


def test_selection_packing_and_acceptance_compile_without_a_break(make_batch: Callable[..., Batch]) -> None:
    batch, drafts = make_batch([4, 5], [2, 9]), Drafts.chain(torch.arange(6).view(2, 3), torch.rand(2, 3))

    def whole(drafts: Drafts, batch: Batch, chosen: torch.Tensor) -> tuple[torch.Tensor, ...]:
        packed, plain = select_fixed(drafts, batch, 5, 99), pack_plain(batch, 99)
        verdict = accept(chosen, packed)
        return packed.token, packed.position, verdict.accepted, verdict.next, verdict.path, plain.cell

    compiled = torch.compile(whole, fullgraph=True, backend="eager")
    for chosen in (torch.tensor([0, 1, 9, 3, 4]), torch.tensor([3, 9, 9, 9, 9])):
        for found, wanted in zip(compiled(drafts, batch, chosen), whole(drafts, batch, chosen), strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("total", [0, 9, B * (D + 1)])
def test_only_cells_behind_each_request_are_written(step: FixedStep, total: int) -> None:
    largest_first(step)
    for layer in step.cache.layers:
        layer.keys.uniform_(), layer.values.uniform_()
    before = [(layer.keys.clone(), layer.values.clone()) for layer in step.cache.layers]
    columns = filled(step, B, live=2)
    row = step(columns, total)
    for layer, old in zip(step.cache.layers, before, strict=True):
        for now, then in zip((layer.keys, layer.values), old, strict=True):
            changed = (now != then).flatten(2).any(2).nonzero().tolist()
            length = columns[1].tolist()
            assert {slot for slot, _ in changed} == set(range(B))
            assert all(length[slot] <= cell <= length[slot] + D for slot, cell in changed)
    assert row.logits.isfinite().all()


def test_spare_rows_are_left_out_and_change_nothing(step: FixedStep) -> None:
    largest_first(step)
    alone = step(filled(step, 2), 2 * (D + 1))
    # Every draft of the two requests is verified either way.
    logits, packed = alone.logits.clone(), alone.packed
    row = step(filled(step, B, live=2), B * (D + 1)).of(2)
    assert (row.spare, row.packed.decoding, len(row.packed.used)) == (2, 2, 2)
    end = int(row.packed.start[-1])
    assert end == 2 * (D + 1)
    assert torch.equal(row.packed.token[:end], packed.token)
    torch.testing.assert_close(row.logits[:end], logits, rtol=1e-12, atol=1e-12)
