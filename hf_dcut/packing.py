"""Drafts + Cut -> Packed: the kept positions of all requests in one row, without padding.

    requests            kept                 packed row
    a: anchor, 1 2 3    a: anchor, 1 2       [a0 a1 a2 b0 c0 c1 c2 c3]
    b: anchor, 1 2 3    b: anchor            start = [0 3 4 8]
    c: anchor, 1 2 3    c: anchor, 1 2 3

Prompts that are being read follow as further requests of the same row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_dcut.kernels import lay_out
from hf_dcut.media import Media, placed
from hf_dcut.types import Batch, Cut, Drafts, Packed


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a prompt that is read in this step.

    Attributes:
        token: int64 [n].
        slot: where its K/V go.
        first: cell of its first token.
        rope: added to a cell to get its position.
        last: whether it ends the prompt, so that the next token is wanted.
        media: of its request, if it is a whole prompt with media.
    """

    token: Tensor
    slot: int
    first: int
    rope: int
    last: bool
    media: Media | None = None


def pack(drafts: Drafts, cut: Cut, batch: Batch, reach: int) -> Packed:
    """Returns the row of B anchors and the kept drafts, request after request.

    Args:
        drafts: chains of N drafts.
        cut: which of them are kept, and how many positions that makes.
        batch: where each request stands.
        reach: cells that any request can use after this step, known on the host.
    """
    columns, start, used = lay_out(
        drafts.token, cut.keep.sum(1), batch.anchor, batch.slot, batch.length, batch.rope, cut.total
    )
    return as_packed(columns, start, used, drafts.token.shape[1], reach)


def as_packed(columns: Tensor, start: Tensor, used: Tensor, depth: int, reach: int) -> Packed:
    """Returns the row of B decoding requests from its columns.

    Args:
        columns: int64 [6, T], token, slot, cell, position, node and number of each packed row.
        start: int32 [B+1].
        used: int32 [B].
        depth: D.
        reach: cells that any request can use after this step, known on the host.
    """
    token, slot, cell, position, node, number = columns.unbind()
    rows = len(used)
    return Packed(
        token, slot, cell, position, node, start, used, number, decoding=rows, slots=rows, reach=reach, width=depth + 1
    )


def pack_plain(batch: Batch, reach: int) -> Packed:
    """Returns the packed row of a step without drafts: the anchors."""
    rows, device = len(batch), batch.slot.device
    none = Drafts.chain(batch.slot.new_zeros(rows, 0), torch.zeros(rows, 0, device=device))
    return pack(none, Cut(none.token.bool(), rows, 0.0, (0,) * rows), batch, reach)


def join(packed: Packed, chunks: Sequence[Chunk]) -> Packed:
    """Returns the row with pieces of prompts behind it; the row itself when there are none.

    Whole prompts with media come by themselves, behind a row that is empty.
    """
    if not chunks:
        return packed
    device = packed.token.device
    sizes = torch.tensor([len(chunk.token) for chunk in chunks])
    ends = sizes.cumsum(0) + len(packed)
    used = torch.tensor([chunk.first for chunk in chunks]) + sizes
    cell = torch.cat([torch.arange(c.first, c.first + len(c.token)) for c in chunks]).to(device)
    rope = torch.repeat_interleave(torch.tensor([c.rope for c in chunks]), sizes).to(device)
    slot = torch.repeat_interleave(torch.tensor([c.slot for c in chunks]), sizes).to(device)
    wanted = ends[torch.tensor([c.last for c in chunks])] - 1
    row = Packed(
        token=torch.cat([packed.token, *(c.token.to(device) for c in chunks)]),
        slot=torch.cat([packed.slot, slot]),
        cell=torch.cat([packed.cell, cell]),
        position=torch.cat([packed.position, cell + rope]),
        node=torch.cat([packed.node, torch.full_like(cell, -1)]),
        start=torch.cat([packed.start, ends.int().to(device)]),
        used=torch.cat([packed.used, used.int().to(device)]),
        logit_rows=torch.cat([packed.logit_rows, wanted.to(device)]),
        decoding=packed.decoding,
        slots=max(packed.slots, *(c.slot + 1 for c in chunks)),
        reach=max(packed.reach, int(used.max())),
        width=packed.width,
        ancestors=packed.ancestors,
    )
    media = [chunk.media for chunk in chunks if chunk.media is not None]
    return placed(row, media) if media else row
