"""Verdict -> Committed: what the target agreed with becomes part of the requests.

Together with `cache.py` the only place that writes requests and caches. The step's verdict is read by the host here,
once, in a single transfer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_dcut.cache import SlotCache
from hf_dcut.requests import Request
from hf_dcut.types import Committed, Packed, Verdict


def commit(
    verdict: Verdict, packed: Packed, taps: Tensor | None, requests: Sequence[Request], cache: SlotCache
) -> Committed:
    """Returns the committed rows, after adding the tokens to the requests.

    Args:
        verdict: on the R requests of the row.
        packed: the row.
        taps: [T, F] outputs of the tapped layers for all rows, or None.
        requests: the R requests in the row's order.
        cache: the target's K/V.
    """
    decoding = packed.decoding
    accepted_rows = verdict.path[verdict.path >= 0]
    drafts = packed.token[verdict.path[:, 1:].clamp_min(0)]
    counts = packed.start.diff()
    table = torch.zeros(len(requests), 3 + max(0, packed.width - 1), dtype=torch.int64, device=drafts.device)
    table[:, 0], table[:, 1], table[:, 2] = counts, verdict.accepted, verdict.next
    table[:decoding, 3:] = drafts
    # The step's one host read of its outcome.
    outcomes = [_advance(request, row) for request, row in zip(requests, table.tolist(), strict=True)]
    kept, accepted, added = zip(*outcomes, strict=True)
    cache.commit(verdict, packed)
    prompt_rows = torch.arange(sum(kept[:decoding]) + decoding, len(packed), device=drafts.device)
    rows = torch.cat([accepted_rows, prompt_rows])
    return Committed(
        slot=packed.slot[rows],
        cell=packed.cell[rows],
        position=packed.position[..., rows],
        token=packed.token[rows],
        taps=None if taps is None else taps[rows],
        kept=kept,
        accepted=accepted,
        added=added,
        finished=tuple(i for i, request in enumerate(requests) if request.finish_reason),
    )


def _advance(request: Request, row: Sequence[int]) -> tuple[int, int, int]:
    """Adds a step's outcome to a request; returns its kept drafts, its committed drafts and its new tokens.

    Args:
        request: the request.
        row: packed rows, accepted drafts, next token (-1: none), then the drafts.
    """
    count, accepted, following, *drafts = row
    if not request.decoding:
        request.read += count
        return 0, 0, request.append([following]) if following >= 0 else 0
    added = request.append([*drafts[:accepted], following])
    kept, accepted = count - 1, min(added, accepted)
    request.totals.steps += 1
    request.totals.kept += kept
    request.totals.accepted += accepted
    return kept, accepted, added
