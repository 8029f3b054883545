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
    outcome = torch.zeros(len(requests), 3 + drafts.shape[1], dtype=torch.int64, device=drafts.device)
    outcome[:, 0], outcome[:, 1], outcome[:, 2] = packed.start.diff(), verdict.accepted, verdict.next
    outcome[:decoding, 3:] = drafts
    # The step's one host read of its outcome.
    told = torch.cat([outcome.flatten(), verdict.path.flatten()]).tolist()
    rows = _in_rows(told[: outcome.numel()], len(requests))
    spans = _spans(rows, _in_rows(told[outcome.numel() :], decoding))
    wanted = _logit_rows(packed, requests, spans)
    # One read more where log-probabilities are asked for.
    logprobs = [] if choice is None or choice.logprobs is None else choice.logprobs.tolist()
    scores = logits if choice is None else choice.scores
    outcomes = [
        _advance(request, row, scores[own], logits[own], [logprobs[i] for i in own] if logprobs else ())
        for request, row, own in zip(requests, rows, wanted, strict=True)
    ]
    kept, accepted, added = zip(*outcomes, strict=True)
    cache.commit(verdict, packed)
    committed = torch.tensor([place for span in spans for place in span]).to(drafts.device)
    return Committed(
        slot=packed.slot[committed],
        cell=packed.text_cells()[committed],
        position=packed.position[..., committed],
        token=packed.token[committed],
        taps=None if taps is None else taps[committed],
        kept=kept,
        accepted=accepted,
        added=added,
        finished=tuple(i for i, request in enumerate(requests) if request.finish_reason),
    )


def _in_rows(numbers: Sequence[int], count: int) -> list[Sequence[int]]:
    """Returns a flat table as so many rows."""
    width = len(numbers) // max(1, count)
    return [numbers[row * width : (row + 1) * width] for row in range(count)]


def _spans(rows: Sequence[Sequence[int]], paths: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Returns the packed rows that are now part of each request: anchor and accepted drafts, or all of a prompt.

    Args:
        rows: packed rows of each request, and its accepted drafts.
        paths: packed rows of the anchor and the accepted drafts, of those that decode.
    """
    ends = list(accumulate(row[0] for row in rows))
    spans: list[Sequence[int]] = [range(end - row[0], end) for end, row in zip(ends, rows, strict=True)]
    for index, path in enumerate(paths):
        spans[index] = path[: rows[index][1] + 1]
    return spans


def _logit_rows(packed: Packed, requests: Sequence[Request], spans: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns which logits each request's new tokens were chosen by; none when nobody keeps any."""
    if not any(request.keeps_scores or request.keeps_logits or request.keeps_logprobs for request in requests):
        return [[]] * len(requests)
    # One read more. Those who decode come first and have the logits of all their rows.
    prompts = packed.logit_spans()[packed.decoding :]
    return [*map(list, spans[: packed.decoding]), *(list(range(span.start, span.stop)) for span in prompts)]


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
