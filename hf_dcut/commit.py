"""Verdict -> Committed: what the target agreed with becomes part of the requests.

Together with `cache.py` the only place that writes requests and caches. The step's verdict is read by the host here,
once, in a single transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from hf_dcut.cache import SlotCache
from hf_dcut.requests import Request
from hf_dcut.types import Choice, Committed, Packed, Verdict


def commit(
    verdict: Verdict,
    packed: Packed,
    choice: Choice | None,
    logits: Tensor,
    taps: Tensor | None,
    requests: Sequence[Request],
    cache: SlotCache,
) -> Committed:
    """Returns the committed rows, after adding the tokens to the requests.

    Args:
        verdict: on the R requests of the row.
        packed: the row.
        choice: what the verdict rests on; its scores go to requests that keep them. None if nobody does.
        logits: [L, V], unprocessed.
        taps: [T, F] outputs of the tapped layers for all rows, or None.
        requests: the R requests in the row's order.
        cache: the target's K/V.
    """
    decoding = packed.decoding
    drafts = packed.token[verdict.path[:, 1:].clamp_min(0)]
    counts = packed.start.diff()
    table = torch.zeros(len(requests), 3 + max(0, packed.width - 1), dtype=torch.int64, device=drafts.device)
    table[:, 0], table[:, 1], table[:, 2] = counts, verdict.accepted, verdict.next
    table[:decoding, 3:] = drafts
    # The step's one host read of its outcome.
    rows = table.tolist()
    spans = _spans(packed, requests)
    # One read more where log-probabilities are asked for.
    logprobs = [] if choice is None or choice.logprobs is None else choice.logprobs.tolist()
    scores = logits if choice is None else choice.scores
    outcomes = [
        _advance(request, row, scores[span], logits[span], logprobs[span])
        for request, row, span in zip(requests, rows, spans, strict=True)
    ]
    kept, accepted, added = zip(*outcomes, strict=True)
    cache.commit(verdict, packed)
    committed = _committed_rows(rows, decoding).to(drafts.device)
    return Committed(
        slot=packed.slot[committed],
        cell=packed.cell[committed],
        position=packed.position[..., committed],
        token=packed.token[committed],
        taps=None if taps is None else taps[committed],
        kept=kept,
        accepted=accepted,
        added=added,
        finished=tuple(i for i, request in enumerate(requests) if request.finish_reason),
    )


def _committed_rows(rows: Sequence[Sequence[int]], decoding: int) -> Tensor:
    """Returns which packed rows are now part of a request: anchors and accepted drafts, then all rows of prompts.

    Args:
        rows: packed rows of each request, and its accepted drafts.
        decoding: how many of the requests decode.
    """
    ends = list(accumulate(row[0] for row in rows))
    spans = [range(end - row[0], end) for end, row in zip(ends, rows, strict=True)]
    for index, row in enumerate(rows[:decoding]):
        spans[index] = spans[index][: row[1] + 1]
    return torch.tensor([place for span in spans for place in span])


def _spans(packed: Packed, requests: Sequence[Request]) -> list[slice]:
    """Returns each request's rows among the logits; empty spans when nobody keeps any, to spare the host read."""
    if any(request.keeps_scores or request.keeps_logits or request.keeps_logprobs for request in requests):
        return packed.logit_spans()
    return [slice(0, 0)] * len(requests)


def _advance(
    request: Request, row: Sequence[int], scores: Tensor, logits: Tensor, logprobs: Sequence[float]
) -> tuple[int, int, int]:
    """Adds a step's outcome to a request; returns its kept drafts, its committed drafts and its new tokens.

    Args:
        request: the request.
        row: packed rows, accepted drafts, next token (-1: none), then the drafts.
        scores, logits: [rows, V] its tokens were chosen by.
        logprobs: of these tokens, if anybody keeps some.
    """
    count, accepted, following, *drafts = row
    if request.finish_reason:
        # It failed while its tokens were chosen.
        return (count - 1) * request.decoding, 0, 0
    if not request.decoding:
        request.read += count
        new, kept, accepted = [following] if following >= 0 else [], 0, 0
    else:
        new, kept = [*drafts[:accepted], following], count - 1
        request.totals.steps += 1
    added = request.append(new, scores, logprobs)
    accepted = min(added, accepted)
    request.totals.kept += kept
    request.totals.accepted += accepted
    if request.keeps_logits:
        request.logits += logits[:added, None].to(torch.float32, copy=True).unbind()
    return kept, accepted, added
