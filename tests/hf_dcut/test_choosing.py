"""The target's tokens against loops: draws by inverse CDF, groups of processors, walks that see committed text only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import (
    ExponentialDecayLengthPenalty,
    MinLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from hf_dcut import choosing
from hf_dcut.branching import branch
from hf_dcut.choosing import BROKEN, _reject, branches, choose, draw, warp
from hf_dcut.noise import Purpose, noise
from hf_dcut.processors import processors_of
from hf_dcut.requests import Request
from hf_dcut.types import Packed, Proposal

V = 7


# Draws.


def inverse_cdf(probability: Sequence[float], height: float) -> int:
    """Returns the first token at which the running sum of probabilities passes `height` of the whole."""
    height *= math.fsum(probability)
    reach = 0.0
    for token, mass in enumerate(probability):
        reach += mass
        if reach > height:
            return token
    raise AssertionError("the height is below 1")


def test_draws_are_those_of_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = 3 * torch.randn(500, V, generator=generator)
    scores[torch.rand(500, V, generator=generator) < 0.4] = -torch.inf
    scores[:, 3] = scores[:, 3].clamp_min(-2.0)  # at least one token is left
    seed, position = torch.arange(500) // 50, torch.arange(500)
    drawn = draw(scores, seed, position)
    heights = noise(seed, position, Purpose.TARGET).tolist()
    rows = scores.softmax(dim=-1).double().tolist()
    assert drawn.tolist() == [inverse_cdf(row, height) for row, height in zip(rows, heights, strict=True)]
    assert scores.gather(1, drawn[:, None]).isfinite().all()


EDGES = [2.0**-53, 0.25 - 2.0**-53, 0.25, 0.25 + 2.0**-53, 0.75, 1 - 2.0**-53]


@pytest.mark.parametrize("height", EDGES)
@pytest.mark.parametrize("banned", [(), (0,), (0, 1), (4,), (3, 4), (0, 2, 4), (0, 1, 2, 3), (1, 2, 3, 4)])
def test_tokens_of_no_probability_never_come_at_any_edge(
    monkeypatch: pytest.MonkeyPatch, height: float, banned: tuple[int, ...]
) -> None:
    monkeypatch.setattr(choosing, "noise", lambda *key: torch.tensor([height], dtype=torch.float64))
    scores = torch.tensor([[-torch.inf if token in banned else 0.0 for token in range(5)]])
    drawn = int(draw(scores, torch.tensor([0]), torch.tensor([0])))
    assert drawn not in banned
    assert drawn == inverse_cdf(scores.softmax(-1)[0].double().tolist(), height)


def test_equal_quarters_meet_at_their_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    for height, token in ((2.0**-53, 0), (0.25 - 2.0**-53, 0), (0.25, 1), (0.5, 2), (0.75, 3), (1 - 2.0**-53, 3)):
        monkeypatch.setattr(choosing, "noise", lambda *key, u=height: torch.tensor([u], dtype=torch.float64))
        assert draw(torch.zeros(1, 4), torch.tensor([0]), torch.tensor([0])).tolist() == [token]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_that_are_no_distribution(bad: float) -> None:
    scores = torch.full((2, 3), bad)
    scores[0] = 0.0
    drawn = draw(scores, torch.zeros(2).long(), torch.zeros(2).long())
    assert (int(drawn[0]) in range(3), int(drawn[1])) == (True, BROKEN)


# Which processors go together.


class Recording(LogitsProcessor):
    """Bans the last token, and keeps the ids and scores it was called with."""

    def __init__(self) -> None:
        self.ids: list[list[int]] = []
        self.scores: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert (len(input_ids), scores.dtype) == (1, torch.float32)
        self.ids += input_ids.tolist()
        self.scores.append(scores.clone())
        return scores.scatter(1, input_ids[:, -1:], -torch.inf)


def make_row(drafts: Sequence[Sequence[int]], requests: Sequence[Request], prompts: Sequence[int] = ()) -> Packed:
    """Returns a packed row of decoding requests with drafts, then of so many last prompt tokens."""
    rows = [[request.tokens[-1], *own] for request, own in zip(requests, drafts, strict=False)]
    rows += [request.prompt[-size:] for request, size in zip(requests[len(drafts) :], prompts, strict=True)]
    begin = [r.length for r in requests[: len(drafts)]]
    begin += [len(r.prompt) - size for r, size in zip(requests[len(drafts) :], prompts, strict=True)]
    start = [sum(map(len, rows[:k])) for k in range(len(rows) + 1)]
    cell = torch.tensor([first + k for first, row in zip(begin, rows, strict=True) for k in range(len(row))])
    decoded = start[len(drafts)]
    return Packed(
        token=torch.tensor([token for row in rows for token in row]),
        slot=torch.zeros_like(cell),
        cell=cell,
        position=cell,
        node=torch.tensor([k - 1 if i < len(drafts) else -1 for i, row in enumerate(rows) for k in range(len(row))]),
        start=torch.tensor(start, dtype=torch.int32),
        used=torch.zeros(len(rows), dtype=torch.int32),
        logit_rows=torch.tensor([*range(decoded), *(end - 1 for end in start[len(drafts) + 1 :])]),
        decoding=len(drafts),
        slots=len(rows),
        reach=0,
        width=max(map(len, rows)),
    )


def decoding_request(number: int, processors: Sequence[LogitsProcessor] = (), **options: object) -> Request:
    """Returns a request that has read three tokens and generated two."""
    prompt, tokens = [1, 2, number % V], [number % V, 4]
    shared, (walked,) = processors_of(LogitsProcessorList(processors), 1)
    options |= {"processors": shared, "walked": walked, "seed": number, "left_pads": number % 3}
    return Request(number, prompt, 99, read=3, tokens=tokens, **options)  # type: ignore[arg-type]


def height(request: Request, width: int, purpose: Purpose) -> float:
    """Returns the number for the token behind so many, padding included: pads do not count."""
    return float(noise(torch.tensor(request.seed), torch.tensor(width - request.left_pads), purpose))


def padded(request: Request) -> list[int]:
    """Returns the ids that plain `generate` would show."""
    return [request.pad] * request.left_pads + request.prompt + request.tokens


def law(scores: torch.Tensor) -> list[list[float]]:
    """Returns the probabilities of float32 scores [n, V]."""
    return scores.softmax(dim=-1).double().tolist()


def loop(logits: torch.Tensor, drafts: Sequence[Sequence[int]], requests: Sequence[Request]) -> list[list[int]]:
    """Returns what each request chooses token by token, going on while its drafts are what it chose."""
    chosen, row = [], 0
    for request, own in zip(requests, drafts, strict=True):
        ids, said = padded(request), []
        for k, draft in enumerate([*own, None]):
            scores = logits[row + k : row + k + 1].float()
            for processor in [*(request.processors or ()), *(request.walked or ())]:
                scores = processor(torch.tensor([ids]), scores.clone())
            if request.samples:
                said.append(inverse_cdf(law(scores)[0], height(request, len(ids), Purpose.TARGET)))
            else:
                said.append(int(scores.argmax()))
            if said[-1] != draft:
                break
            ids.append(draft)
        row += len(own) + 1
        chosen.append(said)
    return chosen


KINDS: dict[str, Callable[[], list[LogitsProcessor]]] = {
    "none": list,
    "cold": lambda: [TemperatureLogitsWarper(0.3), TopKLogitsWarper(3)],
    "hot": lambda: [TemperatureLogitsWarper(2.0)],
    "penalty": lambda: [RepetitionPenaltyLogitsProcessor(3.0), TopKLogitsWarper(4)],
    "recording": lambda: [Recording()],
    "penalty and recording": lambda: [RepetitionPenaltyLogitsProcessor(3.0), Recording(), TopKLogitsWarper(4)],
    "lengths and bans": lambda: [
        NoRepeatNGramLogitsProcessor(2),
        SequenceBiasLogitsProcessor([[[4, 3], 2.0], [[5], -1.0]]),
        MinLengthLogitsProcessor(9, 3),
        ExponentialDecayLengthPenalty((1, 1.5), 4, 6),
    ],
}


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_equals_a_loop_for_any_mix_of_requests(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.tuples(st.sampled_from(list(KINDS)), st.booleans()), min_size=1, max_size=6), "kinds")
    drafts = [data.draw(st.lists(st.integers(3, 4), max_size=3), "drafts") for _ in kinds]
    requests = [decoding_request(i, KINDS[kind](), samples=samples) for i, (kind, samples) in enumerate(kinds)]
    for request, (kind, _) in zip(requests, kinds, strict=True):
        if not request.walked:
            # As in a call of `generate`, lists of which nothing is walked are shared.
            request.processors = next(r.processors for r, k in zip(requests, kinds, strict=True) if k[0] == kind)
    packed = make_row(drafts, requests)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99), "weights"))
    logits = torch.randn(len(packed), V, dtype=torch.float64, generator=generator)
    logits[:, 3] += 2  # so that drafts are often right
    before = logits.clone()
    choice = choose(logits, packed, requests)
    assert torch.equal(logits, before)
    for request, span, said in zip(requests, packed.logit_spans(), loop(logits, drafts, requests), strict=True):
        chosen = choice.token[span].tolist()
        assert chosen[: len(said)] == said
        assert not request.walked or chosen[len(said) :] == [-1] * (len(chosen) - len(said))


@pytest.mark.parametrize(
    ("kind", "options", "calls"),
    [
        (TemperatureLogitsWarper, (0.5,), 1),
        (RepetitionPenaltyLogitsProcessor, (2.0,), 1),
        (NoRepeatNGramLogitsProcessor, (2,), 1),
        (MinLengthLogitsProcessor, (8, 3), 2),  # the rows that are too short, and the others
    ],
)
def test_requests_that_share_processors_are_one_call_whatever_they_do(
    monkeypatch: pytest.MonkeyPatch, kind: type[LogitsProcessor], options: tuple[float, ...], calls: int
) -> None:
    inner, rows = kind.__call__, []

    def counting(self: LogitsProcessor, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows.append(len(scores))
        return inner(self, input_ids, scores)

    monkeypatch.setattr(kind, "__call__", counting)
    requests = [decoding_request(i, samples=i < 3) for i in range(4)]
    for request in requests:
        request.processors = processors_of(LogitsProcessorList([kind(*options)]), 4)[0]
    for request in requests[1:]:
        request.processors = requests[0].processors
    packed = make_row([[3, 4], [], [3], [4]], requests)
    choose(torch.randn(len(packed), V), packed, requests)
    assert (sum(rows), len(rows)) == (8, calls)


def test_a_walk_stops_at_the_first_draft_that_is_not_chosen() -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([3, 5, 6, 0, 5, 3, 6]), V).double()
    requests = [decoding_request(1, [Recording()]), decoding_request(2, [Recording()])]
    choice = choose(logits, make_row([[3, 4, 6], [5, 3]], requests), requests)
    assert choice.token.tolist() == [3, 5, -1, -1, 5, 3, 6]
    seen = [request.walked[0].ids for request in requests]  # type: ignore[index]
    assert seen == [
        [[0, 1, 2, 1, 1, 4], [0, 1, 2, 1, 1, 4, 3]],
        [[0, 0, 1, 2, 2, 2, 4], [0, 0, 1, 2, 2, 2, 4, 5], [0, 0, 1, 2, 2, 2, 4, 5, 3]],
    ]
    assert torch.equal(choice.scores[0], logits[0].float().index_fill(0, torch.tensor(4), -torch.inf))
    assert torch.equal(choice.scores[2], logits[2].float()), "not looked at, not processed"


def test_a_walk_stops_at_an_end_token() -> None:
    request = decoding_request(1, [Recording()], eos=frozenset({5}))
    logits = torch.nn.functional.one_hot(torch.tensor([3, 5, 6, 6]), V).double()
    assert choose(logits, make_row([[3, 5, 6]], [request]), [request]).token.tolist() == [3, 5, -1, -1]
    assert len(request.walked[0].ids) == 2  # type: ignore[index]


@pytest.mark.parametrize("keeps", [False, True])
def test_a_walk_stops_where_a_criterion_does_which_is_asked_once(keeps: bool) -> None:
    asked = []

    def at_five(ids: torch.Tensor, scores: tuple[torch.Tensor, ...] | None) -> torch.Tensor:
        asked.append((ids.tolist(), scores and [row.argmax().item() for row in scores]))
        return ids[:, -1] == 5

    request = decoding_request(1, [Recording()], criteria=StoppingCriteriaList([at_five]), keeps_scores=keeps)
    logits = torch.nn.functional.one_hot(torch.tensor([3, 5, 6, 6]), V).double()
    choice = choose(logits, make_row([[3, 5, 6]], [request]), [request])
    assert choice.token.tolist() == [3, 5, -1, -1]
    begin = [0, 1, 2, 1, 1, 4]
    assert request.walked[0].ids == [begin, [*begin, 3]], "the grammar is not shown what comes behind the end"  # type: ignore[index]
    assert request.append([3, 5, -1], choice.scores) == 2
    assert (request.tokens[2:], request.finish_reason) == ([3, 5], "stop")
    assert asked == [([[*begin, 3]], [3] if keeps else None), ([[*begin, 3, 5]], [3, 5] if keeps else None)]


def test_a_walk_stops_at_the_length() -> None:
    request = decoding_request(1, [Recording()])
    request.max_new_tokens = 4
    logits = torch.nn.functional.one_hot(torch.tensor([3, 5, 6, 6]), V).double()
    assert choose(logits, make_row([[3, 5, 6]], [request]), [request]).token.tolist() == [3, 5, -1, -1]
    assert len(request.walked[0].ids) == 2  # type: ignore[index]


def test_prompts_are_processed_once_they_are_read() -> None:
    requests = [Request(i, [1, 2, 3], 9, walked=LogitsProcessorList([Recording()])) for i in range(2)]
    packed = make_row([], requests, prompts=[2, 3])
    logits = torch.zeros(2, V)
    logits[:, 3] = 1.0
    assert choose(logits, packed, requests).token.tolist() == [0, 0], "3 is banned, the first of the others is taken"
    assert [request.walked[0].ids for request in requests] == [[[1, 2, 3]]] * 2  # type: ignore[index]


def test_ties_break_as_in_generate() -> None:
    close = torch.tensor([[0.0, 1.0, 1.0 + 1e-12, 1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    assert close.argmax().item() == 2
    request = decoding_request(0)
    choice = choose(close, make_row([[]], [request]), [request])
    assert choice.token.tolist() == close.float().argmax(-1).tolist() == [1]
    assert choice.scores.dtype == torch.float32


@pytest.mark.parametrize("shape", [(1, V - 1), (2, V), (V,)], ids=str)
def test_processors_must_keep_the_shape(shape: tuple[int, ...]) -> None:
    class Wrong(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return torch.zeros(shape)

    request = decoding_request(0, [TopKLogitsWarper(3), Recording(), Wrong()])
    with pytest.raises(ValueError, match=r"logits_processor \(Recording, Wrong\) turned scores of shape \(1, 7\) into"):
        choose(torch.zeros(1, V), make_row([[]], [request]), [request])


def test_warping_needs_processors_that_look_at_scores_alone() -> None:
    scores = torch.tensor([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]])
    cold = decoding_request(0, [TemperatureLogitsWarper(0.5), TopKLogitsWarper(2)])
    assert warp(cold, scores).tolist() == [[-math.inf, 2.0, 4.0], [4.0, 2.0, -math.inf]]
    with pytest.raises(AssertionError, match="own prefix"):
        warp(decoding_request(0, [Recording()]), scores)
    with pytest.raises(AssertionError, match="reads the text"):
        warp(decoding_request(0, [NoRepeatNGramLogitsProcessor(2)]), scores)


# Rows that nobody can draw from.


def test_a_request_that_must_draw_from_nothing_is_named() -> None:
    banned = [SuppressTokensLogitsProcessor(list(range(V)))]
    requests = [decoding_request(0, samples=True), decoding_request(1, banned, samples=True)]
    with pytest.raises(RuntimeError, match=r"^the scores of SuppressTokensLogitsProcessor are no distribution: they"):
        choose(torch.zeros(4, V), make_row([[3], [3]], requests), requests)
    logits = torch.zeros(2, V)
    logits[1, 4] = math.nan
    with pytest.raises(RuntimeError, match=r"^the model's logits are no distribution"):
        choose(logits, make_row([[], []], requests[:1] * 2), requests[:1] * 2)
    walked = [decoding_request(0, [PerToken(lambda scores: scores - math.inf), TopKLogitsWarper(2)], samples=True)]
    with pytest.raises(RuntimeError, match=r"^the scores of PerToken, TopKLogitsWarper are no distribution"):
        choose(torch.zeros(1, V), make_row([[]], walked), walked)


class PerToken(LogitsProcessor):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]):
        self.function = function

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.function(scores)


def test_rows_behind_a_rejected_draft_may_be_no_distribution() -> None:
    # The second draft would leave no token that was not there before; plain `generate` never sees that text.
    bans = [NoRepeatNGramLogitsProcessor(1), SuppressTokensLogitsProcessor([0])]
    request = decoding_request(3, bans, samples=True, left_pads=0)
    assert set(padded(request)) == {1, 2, 3, 4}
    logits = torch.zeros(3, V)
    logits[0, 5] = 100.0
    packed = make_row([[6, 5]], [request])
    token = choose(logits, packed, [request]).token.tolist()
    assert token[0] == 5
    assert token[2] == BROKEN
    packed, logits[1, 6] = make_row([[5, 6]], [request]), 100.0
    with pytest.raises(RuntimeError, match="NoRepeatNGramLogitsProcessor, SuppressTokensLogitsProcessor are no distr"):
        choose(logits, packed, [request])


# Trees.


def make_tree(drafts: Sequence[int], parent: Sequence[int], request: Request) -> Packed:
    """Returns a packed row of one request, with nodes that follow these."""
    return branch(make_row([drafts], [request]), torch.tensor([parent]))


def test_who_may_be_given_a_tree() -> None:
    def given(*kinds: LogitsProcessor) -> bool:
        return branches(decoding_request(3, kinds))

    assert branches(Request(0, [1], 9))
    assert given(TemperatureLogitsWarper(0.5), TopKLogitsWarper(3), SuppressTokensLogitsProcessor([5]))
    assert not given(TemperatureLogitsWarper(0.5), RepetitionPenaltyLogitsProcessor(1.5))
    assert not given(MinLengthLogitsProcessor(9, 3)), "it looks at how long the text is"
    assert not given(Recording())


def test_siblings_are_drawn_as_the_same_token_of_the_text() -> None:
    request = decoding_request(3, [TopKLogitsWarper(4)], samples=True)
    logits = torch.randn(6, V, generator=torch.Generator().manual_seed(0))
    choice = choose(logits, make_tree([5, 6, 3, 4, 5], [-1, -1, 0, 1, 2], request), [request])
    width = len(padded(request))
    for row, deep in enumerate([0, 1, 1, 2, 2, 3]):
        expected = inverse_cdf(law(choice.scores)[row], height(request, width + deep, Purpose.TARGET))
        assert choice.token[row] == expected


def test_rows_off_the_path_of_a_tree_may_be_no_distribution() -> None:
    request = decoding_request(3, samples=True)
    packed = make_tree([5, 6, 3], [-1, -1, 1], request)
    logits = torch.zeros(4, V)
    logits[0, 6], logits[2, 4], logits[1] = 100.0, 100.0, math.nan
    assert choose(logits, packed, [request]).token.tolist()[:3] == [6, BROKEN, 4]
    logits[3] = math.nan
    choose(logits, packed, [request])
    logits[2, 4], logits[2, 3] = 0.0, 100.0
    with pytest.raises(RuntimeError, match="the model's logits are no distribution"):
        choose(logits, packed, [request])


# Log-probabilities.


@pytest.mark.parametrize("samples", [False, True])
def test_log_probabilities_are_those_of_the_processed_scores(samples: bool) -> None:
    kinds = [[], [TopKLogitsWarper(3)], [RepetitionPenaltyLogitsProcessor(2.0)], [Recording(), TopKLogitsWarper(4)]]
    requests = [decoding_request(i, kind, samples=samples, keeps_logprobs=i != 1) for i, kind in enumerate(kinds)]
    packed = make_row([[3], [], [4, 3], [3]], requests)
    logits = torch.randn(len(packed), V, generator=torch.Generator().manual_seed(0))
    choice = choose(logits, packed, requests)
    assert choice.logprobs is not None
    for row, (token, logprob) in enumerate(zip(choice.token.tolist(), choice.logprobs.tolist(), strict=True)):
        if token >= 0:
            assert logprob == pytest.approx(math.log(law(choice.scores)[row][token]), abs=1e-6)
    for request in requests:
        request.keeps_logprobs = False
    assert choose(logits, packed, requests).logprobs is None


# Rejection sampling.


def rejecting(count: int, rows: int) -> tuple[Packed, list[Request], torch.Tensor, torch.Tensor, Proposal]:
    """Returns a row of requests with 0 to 3 drafts, their draws from p, p's scores, and the drafts' law q."""
    generator = torch.Generator().manual_seed(count)
    sizes = torch.randint(0, 4, (rows,), generator=generator).tolist()
    probability = (2 * torch.randn(rows, 3, V, generator=generator)).softmax(dim=-1)
    drawn = torch.multinomial(probability.flatten(0, 1), 1, generator=generator).view(rows, 3).tolist()
    requests = [decoding_request(100 * count + i, samples=True) for i in range(rows)]
    packed = make_row([own[:size] for own, size in zip(drawn, sizes, strict=True)], requests)
    scores = 2 * torch.randn(len(packed), V, generator=generator)
    scores[torch.rand(scores.shape, generator=generator) < 0.2] = -torch.inf
    scores[:, 0] = scores[:, 0].clamp_min(-1.0)
    token = torch.randint(0, V, (len(packed),), generator=generator)
    return packed, requests, token, scores, Proposal(probability)


@pytest.mark.parametrize("count", range(4))
def test_rejection_equals_a_loop(count: int) -> None:
    packed, requests, token, scores, proposal = rejecting(count, rows=64)
    got, start, accepted = _reject(token, scores, packed, requests, proposal).tolist(), packed.start.tolist(), 0
    p, q = law(scores), proposal.probability.double().tolist()
    for i, request in enumerate(requests):
        width = len(padded(request))
        for k, row in enumerate(range(start[i], start[i + 1])):
            if row + 1 == start[i + 1]:
                assert got[row] == token[row], "no draft behind it: the draw from p stands"
                continue
            draft = int(packed.token[row + 1])
            if height(request, width + k, Purpose.ACCEPT) * q[i][k][draft] < p[row][draft]:
                accepted += 1
                assert got[row] == draft
                continue
            residual = [max(0.0, ours - theirs) for ours, theirs in zip(p[row], q[i][k], strict=True)]
            assert got[row] == inverse_cdf(residual, height(request, width + k, Purpose.RECOVER))
            assert got[row] != draft, "what was rejected does not come back"
            assert p[row][got[row]] > 0
    assert 0.2 < accepted / (len(packed) - len(requests)) < 0.9


def test_what_the_target_wants_more_is_always_accepted_and_what_it_bans_never() -> None:
    requests = [decoding_request(i, samples=True) for i in range(200)]
    packed = make_row([[3]] * 200, requests)
    q = torch.full((200, 1, V), 1 / V)
    for own, kept in (
        (torch.tensor([0.0, 0, 0, 1, 0, 0, 0]), True),
        (torch.tensor([1.0, 1, 1, -torch.inf, 1, 1, 1]), False),
    ):
        token = _reject(torch.zeros(400).long(), own.expand(400, V), packed, requests, Proposal(q))
        assert set((token[::2] == 3).tolist()) == {kept}


def test_equal_laws_reject_nothing() -> None:
    requests = [decoding_request(i, samples=True) for i in range(200)]
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(400, V, generator=generator)
    probability = scores.softmax(dim=-1)[::2, None]
    drawn = torch.multinomial(probability[:, 0], 1, generator=generator).tolist()
    packed = make_row(drawn, requests)
    token = _reject(torch.zeros(400).long(), scores, packed, requests, Proposal(probability))
    assert token[::2].tolist() == [own for (own,) in drawn]


def test_steps_without_drafts_reject_nothing() -> None:
    requests = [decoding_request(i, samples=True) for i in range(3)]
    packed = make_row([[], [], []], requests)
    token = torch.tensor([1, 2, 3])
    assert _reject(token, torch.zeros(3, V), packed, requests, Proposal(torch.zeros(3, 2, V))).tolist() == [1, 2, 3]
