"""Recorded steps: the same texts as without, at every shape, and what happens where there are none.

On a CPU a recorder stands in that replays by calling the function again, so everything but the recording is real.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_dcut import attention
from hf_dcut import graphs as graphs_module
from hf_dcut.assembly import open_engine
from hf_dcut.budget import positions
from hf_dcut.config import PAPER_RATIOS, DCutConfig
from hf_dcut.cost_table import CostTable
from hf_dcut.drafters.base import Drafter
from hf_dcut.drafters.best_of import BestOf
from hf_dcut.drafters.dflash import DFlashDrafter
from hf_dcut.drafters.oracle import BoundOracle, OracleDrafter
from hf_dcut.drafters.prompt_lookup import PromptLookupDrafter
from hf_dcut.fixed_step import FixedRow
from hf_dcut.graphs import Graphs, smallest
from hf_dcut.ranks import Ranks
from hf_dcut.requests import Request, batch_of
from hf_dcut.selecting import select
from hf_dcut.stats import Stats
from hf_dcut.timing import REPEATS, WARM_UP
from hf_dcut.types import Drafts

D, END = 3, 43
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [16, 17], [18, 19, 20, 21], [22], [23, 24, 25, 26, 27]]
LENGTHS = [12, 1, 7, 2, 9, 14, 3]
KINDS = ("prompt lookup", "oracle", "wrong oracle", "dflash")


@dataclass
class CallAgain:
    """Stands in for CUDA graphs: replays by calling the function, under the rules of a recording."""

    watch: Callable[[], AbstractContextManager[None]]
    fail: Callable[[int], Exception | None] = lambda number: None
    strict: bool = True
    recorded: int = 0
    drafted: int = 0
    replays: list[tuple[int, int]] = field(default_factory=list)

    def record(self, run: Callable[[], Any]) -> Callable[[], Any]:
        error = self.fail(self.recorded)
        self.recorded += 1
        if error is not None:
            raise error
        first = run()

        def replay() -> Any:
            with self.watch() if self.strict else nullcontext():
                row = run()
            if isinstance(row, FixedRow):
                assert row.logits.data_ptr() == first.logits.data_ptr()
                self.replays.append((row.packed.decoding, len(row.packed)))
            else:
                assert row.shape == (1,), "one number is read"
                self.drafted += 1
            return row

        return replay

    def bytes(self) -> int:
        return 0


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, no_host_reads: Callable[[], AbstractContextManager[None]]) -> CallAgain:
    """Takes the place of CUDA's, on the CPU."""
    stand_in = CallAgain(no_host_reads)
    monkeypatch.setattr(graphs_module, "recorder_for", lambda device: stand_in)
    # It reads its own table on the host when it meets a request, which a real recording could not hold.
    monkeypatch.setattr(BoundOracle, "capturable", True)
    return stand_in


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return tiny_llama(eos_token_id=None)


@pytest.fixture(scope="module")
def texts(model: PreTrainedModel, said_alone: Callable[..., list[list[int]]]) -> list[list[int]]:
    """What plain `generate` says after each prompt alone."""
    return said_alone(model, PROMPTS, LENGTHS, END)


def make_drafter(kind: str, model: PreTrainedModel, texts: Sequence[Sequence[int]]) -> Drafter | None:
    shape = {"taps": [0, 2], "mask_token_id": 3, "block_size": D + 1, "layers": 2, "dtype": torch.float64}
    known = {tuple(p): list(t) for p, t in zip(PROMPTS, texts, strict=True)}
    return {
        "none": lambda: None,
        "prompt lookup": lambda: PromptLookupDrafter(D),
        "oracle": lambda: OracleDrafter(known, D, (0.1, 0.7, 1.0)),
        "wrong oracle": lambda: OracleDrafter(known, D, (0.0,)),
        "dflash": lambda: DFlashDrafter.random(model.config, **shape),
        "best of": lambda: BestOf([DFlashDrafter.random(model.config, **shape), PromptLookupDrafter(D)]),
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


@pytest.mark.parametrize("kind", ["none", "prompt lookup", "oracle", "wrong oracle", "dflash", "best of"])
@pytest.mark.parametrize(("slots", "at_once"), [(1, 4096), (3, 1), (9, 4096)])
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
    assert sum(stats.histogram.values()) == stats.rows


@pytest.mark.parametrize("budget", ["none", 0.25, 0.6, 1.0, "auto"])
def test_at_any_budget(recorder: CallAgain, model: PreTrainedModel, texts: list[list[int]], budget: Any) -> None:
    recorder.strict = False
    requests = make_requests()
    drafter = make_drafter("none" if budget == "none" else "oracle", model, texts)
    stats = run(model, drafter, 7, requests, budget=budget)
    assert [request.tokens for request in requests] == texts
    assert recorder.replays
    assert (stats.drafted_steps > 0) == (budget != "none")


@pytest.mark.parametrize("ratio", [0.1, 0.25, 0.5, 0.6, 1.0])
@pytest.mark.parametrize("depth", [1, 3, 15])
def test_every_step_of_a_budget_fits_into_the_next_size(ratio: float, depth: int) -> None:
    sizes = (1, 2, 4, 8, 11)
    shapes = [(b, t) for b in sizes for t in (0, positions(ratio, b, depth))]
    for requests in range(1, 12):
        rows = next(b for b in sizes if b >= requests)
        assert smallest(shapes, requests, positions(ratio, requests, depth)) == (rows, positions(ratio, rows, depth))
        assert smallest(shapes, requests, 0) == (rows, 0)


@pytest.mark.parametrize(
    ("requests", "total", "shape"),
    [
        (1, 1, (2, 4)),
        (2, 4, (2, 4)),
        (2, 5, (4, 8)),  # two spare rows: seven places
        (2, 6, (4, 8)),
        (2, 7, None),  # two spare rows: nine places
        (3, 7, (4, 8)),
        (4, 9, None),
        (5, 5, None),
        (3, 0, (4, 0)),
        (5, 0, None),
    ],
)
def test_the_smallest_shape_that_holds_a_step(requests: int, total: int, shape: tuple[int, int] | None) -> None:
    assert smallest([(4, 8), (4, 0), (2, 0), (2, 4)], requests, total) == shape


def test_sizes_are_rounded_up(recorder: CallAgain, model: PreTrainedModel, texts: list[list[int]]) -> None:
    """Seven requests, of which fewer and fewer go on, run as 7, 4, 2 or 1."""
    run(model, make_drafter("dflash", model, texts), 7, make_requests(), budget=0.5, max_prefill_tokens=99)
    assert {rows for rows, _ in recorder.replays} <= {1, 2, 4, 7}
    # 0.5 of B (D+1) places, or anchors alone once no request has room for a draft.
    assert set(recorder.replays) <= {(b, t) for b in (1, 2, 4, 7) for t in (2 * b, b)}


def test_auto_takes_the_budget_of_the_last_steps_drafts(
    recorder: CallAgain, model: PreTrainedModel, texts: list[list[int]]
) -> None:
    """Sure drafts call for all of them, doubtful ones for as few as there are."""
    chosen = {}
    for profile in ((1.0,), (0.01,)):
        recorder.strict, known = False, {tuple(p): list(t) for p, t in zip(PROMPTS, texts, strict=True)}
        requests = make_requests()
        flat = CostTable.from_rows({b: {0: 1.0} | {t * b: 0.3 + t / 10 for t in (1, 2, 3, 4)} for b in (1, 8)}, D)
        stats = run(model, OracleDrafter(known, D, profile), 7, requests, budget="auto", cost_table=flat)
        assert [request.tokens for request in requests] == texts
        chosen[profile] = {record.budget for record in stats.records or [] if record.budget}
    # Near its end a request has no room for all.
    assert chosen == {(1.0,): {0.75, 1.0}, (0.01,): {0.25}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("slots", "sizes"), [(1, None), (7, None), (7, (2, 8, 7))])
def test_a_budget_that_is_read_is_an_eager_steps(
    recorder: CallAgain,
    model: PreTrainedModel,
    texts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    slots: int,
    sizes: tuple[int, ...] | None,
) -> None:
    """From the same drafts, with and without spare rows."""
    recorder.strict = "oracle" not in kind
    run_best, eager = Graphs.run_best, []

    def compared(self: Graphs, requests: Sequence[Request], menu: Callable[[int], torch.Tensor]) -> Any:
        row, best = run_best(self, requests, menu)
        count, rows = len(requests), min(b for b in self.drafting if b >= len(requests))
        kept, belief = self.inputs[rows].drafts, float(menu(rows)[2, 0]) * count / rows
        drafts = Drafts.chain(kept.token[:count], kept.confidence[:count], kept.count[:count])
        _, chosen = select(drafts, batch_of(requests, "cpu"), PAPER_RATIOS, costs(), 99, belief)
        eager.append(chosen.budget)
        return row, best

    monkeypatch.setattr(Graphs, "run_best", compared)
    requests, options = make_requests(), {"cuda_graph_budget": "read", "cuda_graph_batch_sizes": sizes}
    stats = run(model, make_drafter(kind, model, texts), slots, requests, budget="auto", **options)
    assert [request.tokens for request in requests] == texts
    assert [record.budget for record in stats.records or [] if record.budget] == eager
    assert recorder.drafted == len(eager) > 0
    assert max(eager) > min(PAPER_RATIOS) or kind != "oracle"


def test_one_budget_is_not_read(recorder: CallAgain, model: PreTrainedModel, texts: list[list[int]]) -> None:
    requests = make_requests()
    run(model, make_drafter("dflash", model, texts), 7, requests, budget=0.5, cuda_graph_budget="read")
    assert [request.tokens for request in requests] == texts
    assert recorder.drafted == 0 < len(recorder.replays)


def test_what_is_measured_reads_too(recorder: CallAgain, model: PreTrainedModel) -> None:
    config = DCutConfig(cuda_graphs=True, cuda_graph_budget="read", cost_table="off")
    with open_engine(model, PromptLookupDrafter(D), config, 3, 4, 40) as engine:
        assert engine.costs is not None
        assert engine.costs.fingerprint["cuda_graphs"] == "read"
    assert recorder.recorded == 3 * 6, "drafts, a plain step and four budgets for each B"
    assert recorder.drafted >= 2 * 4 * (WARM_UP + REPEATS)


@pytest.mark.parametrize(
    ("failing", "said"), [({1, 2}, "of 7 requests with 19 packed"), (set(range(4)), "with drafts")]
)
def test_where_memory_ends_what_was_drafted_is_drafted_again(
    recorder: CallAgain,
    model: PreTrainedModel,
    texts: list[list[int]],
    caplog: pytest.LogCaptureFixture,
    failing: set[int],
    said: str,
) -> None:
    """The two largest shapes do not fit, or none that drafts."""
    recorder.strict, recorder.fail = False, lambda number: torch.OutOfMemoryError() if number in failing else None
    flat = CostTable.from_rows({b: {0: 1.0, b: 1.0, 4 * b: 1.001} for b in (1, 8)}, D)
    known = {tuple(p): list(t) for p, t in zip(PROMPTS, texts, strict=True)}
    requests, options = make_requests(), {"cuda_graph_budget": "read", "cuda_graph_batch_sizes": (7,)}
    run(model, OracleDrafter(known, D, (1.0,)), 7, requests, budget="auto", cost_table=flat, **options)
    assert [request.tokens for request in requests] == texts
    assert said in caplog.messages[1]


def test_draws_and_scores_are_those_without_graphs(
    recorder: CallAgain, model: PreTrainedModel, texts: list[list[int]]
) -> None:
    outcomes = []
    for asked in (True, False):
        requests = make_requests(samples=True, seed=5, keeps_scores=True, keeps_logits=True, keeps_logprobs=True)
        run(model, make_drafter("prompt lookup", model, texts), 4, requests, cuda_graphs=asked)
        outcomes.append(requests)
    assert recorder.replays
    for replayed, eager in zip(*outcomes, strict=True):
        assert replayed.tokens == eager.tokens
        for name in ("scores", "logits", "logprobs"):
            found, expected = (torch.as_tensor(_stacked(getattr(r, name))) for r in (replayed, eager))
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def _stacked(values: list[Any]) -> Any:
    return torch.stack(values) if isinstance(values[0], torch.Tensor) else values


def test_drafts_that_cannot_be_ranked(
    recorder: CallAgain, model: PreTrainedModel, texts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    drafter = make_drafter("dflash", model, texts)
    assert isinstance(drafter, DFlashDrafter)
    drafter.model.norm.weight.fill_(torch.nan)
    requests = make_requests()
    run(model, drafter, 3, requests)
    assert [request.tokens for request in requests] == texts
    assert [line for line in caplog.messages if "non-finite" in line] == caplog.messages[:1] == caplog.messages


def test_costs_are_those_of_replayed_steps(recorder: CallAgain, model: PreTrainedModel) -> None:
    config = DCutConfig(cuda_graphs=True, cost_table="off")
    with open_engine(model, PromptLookupDrafter(D), config, 3, 4, 40) as engine:
        assert engine.costs is not None
        assert engine.costs.fingerprint["cuda_graphs"] == "last"
        assert set(engine.costs.seconds[16]) == {1, 2}
    counts = Counter(recorder.replays)
    # All are tried once, B places as a plain step and as a budget; powers of two are measured, at each quarter.
    measured = {(b, t) for b in (1, 2) for t in (b, 2 * b, 3 * b, 4 * b)}
    assert {shape for shape, count in counts.items() if count == 1} == {(3, 6), (3, 9), (3, 12)}
    assert counts[3, 3] == 2
    assert {shape for shape, count in counts.items() if count > WARM_UP + REPEATS} == measured


def test_beyond_the_sizes_steps_run_eagerly_and_that_is_said_once(
    recorder: CallAgain, model: PreTrainedModel, texts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    requests = make_requests()
    drafter = make_drafter("prompt lookup", model, texts)
    run(model, drafter, 7, requests, cuda_graph_batch_sizes=(2, 64))
    assert [request.tokens for request in requests] == texts
    assert {rows for rows, _ in recorder.replays} == {2}
    (line,) = caplog.messages
    assert "no CUDA graph for steps of 6 requests with 12 packed tokens" in line


def test_where_memory_ends_there_are_fewer_graphs(
    recorder: CallAgain, model: PreTrainedModel, texts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    recorder.fail = lambda number: torch.OutOfMemoryError() if number < 3 else None
    requests = make_requests()
    run(model, make_drafter("dflash", model, texts), 7, requests)
    assert [request.tokens for request in requests] == texts
    assert {rows for rows, _ in recorder.replays} == {1, 2, 4}
    assert "memory holds 5 of 8 CUDA graphs" in caplog.messages[0]


@pytest.mark.parametrize("asked", [True, "auto"])
def test_a_step_that_cannot_be_recorded(
    recorder: CallAgain,
    model: PreTrainedModel,
    texts: list[list[int]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    asked: Any,
) -> None:
    monkeypatch.setattr(graphs_module, "_WORTH", 1)
    recorder.fail = lambda number: RuntimeError("operation not permitted when stream is capturing")
    requests = make_requests()
    if asked is True:
        with pytest.raises(RuntimeError, match=r"cuda_graphs=True: a step cannot be recorded .*stream is capturing"):
            run(model, make_drafter("dflash", model, texts), 3, requests)
        return
    run(model, make_drafter("dflash", model, texts), 3, requests, cuda_graphs=asked)
    assert [request.tokens for request in requests] == texts
    assert ["no CUDA graphs: a step cannot be recorded" in line for line in caplog.messages] == [True]


def test_a_replay_that_does_not_follow_its_inputs_is_found(recorder: CallAgain, model: PreTrainedModel) -> None:
    def stale(run: Callable[[], FixedRow]) -> Callable[[], FixedRow]:
        row = run()
        kept = row.logits.clone()

        def replay() -> FixedRow:
            row.logits.copy_(kept)
            return row

        return replay

    recorder.record = stale  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"gives other logits than the step itself"):
        run(model, None, 3, make_requests())


@pytest.mark.parametrize(
    ("drafter", "options", "reason"),
    [
        (PromptLookupDrafter(D), {}, "they need a CUDA device, and the target is on cpu"),
        (None, {"budget": "none"}, "they need a CUDA device, and the target is on cpu"),
    ],
)
def test_asking_for_graphs_on_a_cpu_is_refused(
    model: PreTrainedModel, drafter: Drafter | None, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=f"cuda_graphs=True: {reason}"):
        run(model, drafter, 3, make_requests(), **options)


def test_drafters_and_options_that_take_part_on_the_host_are_refused(
    recorder: CallAgain, model: PreTrainedModel, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="with proposals='sampled' each request's own options take part in drafting"):
        run(model, make_drafter("dflash", model, texts), 3, make_requests(), proposals="sampled")
    monkeypatch.setattr(BoundOracle, "capturable", False)
    with pytest.raises(ValueError, match="BoundOracle reads numbers on the host while it drafts"):
        run(model, make_drafter("oracle", model, texts), 3, make_requests())


def test_targets_whose_steps_wait_for_the_host_are_refused(
    recorder: CallAgain,
    model: PreTrainedModel,
    make_target: Callable[..., PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="cuda_graphs=True: the states of recurrent layers take in accepted tokens"):
        run(make_target("qwen3_5"), None, 3, make_requests(), budget="none")
    shared = Ranks()
    shared.size = 2
    monkeypatch.setattr(Ranks, "of", classmethod(lambda cls, model: shared))
    monkeypatch.setattr(Ranks, "check", lambda self, facts: None)
    monkeypatch.setattr(Ranks, "least", lambda self, number: number, raising=False)
    with pytest.raises(ValueError, match="cuda_graphs=True: processes that share a model ask each other"):
        run(model, None, 3, make_requests(), budget="none")


def test_auto_records_only_what_may_pay(recorder: CallAgain, model: PreTrainedModel) -> None:
    for new_tokens in (127, 128):
        with open_engine(model, None, DCutConfig(budget="none"), 2, 4, 4 + new_tokens):
            assert recorder.recorded == (0 if new_tokens == 127 else 2)
    with open_engine(model, None, DCutConfig(budget="none", cuda_graphs=False), 2, 4, 400):
        assert recorder.recorded == 2


def test_auto_uses_no_graphs_on_a_cpu(model: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    with open_engine(model, None, DCutConfig(budget="none"), 2, 4, 400) as engine:
        assert engine.replaying.graphs is None
    assert caplog.messages == []


@pytest.mark.slow
def test_on_the_fused_kernels(
    recorder: CallAgain,
    tiny_qwen3: Callable[..., PreTrainedModel],
    texts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In Triton's interpreter, which reads on the host what the kernels themselves do not."""
    pytest.importorskip("triton")
    recorder.strict = False
    model = tiny_qwen3(torch.float32, eos_token_id=None, num_hidden_layers=2)
    outcomes = []
    for path in ("reference", "triton"):
        monkeypatch.setattr(attention, "attention_path", lambda *given, path=path: path)
        monkeypatch.setattr("hf_dcut.kernels.select_path", lambda *given, path=path: path)
        requests = make_requests()[:3]
        run(model, make_drafter("prompt lookup", model, texts), 3, requests)
        outcomes.append([request.tokens for request in requests])
    assert outcomes[0] == outcomes[1]


@pytest.mark.gpu
@pytest.mark.parametrize(("budget", "comes_from"), [(0.5, "last"), ("auto", "last"), ("auto", "read")])
@pytest.mark.parametrize("kind", ["prompt lookup", "dflash"])
def test_recorded_on_a_device(
    model: PreTrainedModel, texts: list[list[int]], kind: str, budget: Any, comes_from: str
) -> None:
    drafter = make_drafter(kind, model, texts)
    on_device = deepcopy(model).to("cuda")
    if isinstance(drafter, DFlashDrafter):
        drafter = drafter.to("cuda")
    requests = make_requests()
    run(on_device, drafter, 7, requests, budget=budget, cuda_graph_budget=comes_from)
    assert [request.tokens for request in requests] == texts
