"""The records that travel between the stages, and the letters their shapes are written with.

    drafter -> scores -> budget -> packing -> verification -> acceptance -> commit
    Drafts     Scores    Cut       Packed     logits, taps    Verdict       Committed

Letters, never redefined anywhere:

    B   live requests                        D   draft tokens a request
    N   the same as nodes of a tree (N = D)  T   packed tokens of one step: the budget, K in the paper
    S   cells of a slot                      V   vocabulary
    A   accepted rows of a step              F   width of a tap row: taps x hidden size

Every record is frozen: a stage takes records and returns a new one. Mutable are the requests and the caches only.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hf_dcut.media import Place


class Record:
    """Base of the records: `.to(device)` moves every tensor inside."""

    __slots__ = ()

    def to(self, device: torch.device | str) -> Self:
        """Returns the same record with its tensors on `device`; the record itself when nothing moves."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        moved = {k: v.to(device) if isinstance(v, (Tensor, Record)) else v for k, v in values.items()}
        return self if all(moved[k] is values[k] for k in values) else type(self)(**moved)


@dataclass(frozen=True, slots=True)
class Batch(Record):
    """What the drafter and the selection know of the B decoding requests, one row each.

    Attributes:
        slot: int64 [B], where the request's K/V are kept. Live rows lie in slots 0 .. B-1; the spare rows of a fixed
            shape lie behind them, in slots that nobody uses.
        length: int64 [B], cells of the slot in use: everything committed but the anchor.
        anchor: int64 [B], the last committed token. It has no K/V yet; it goes to cell `length`.
        room: int64 [B], how many drafts could still be committed before the request's maximum length.
        seed: int64 [B], key of the request's random numbers.
        rope: int64 [B], what is added to a cell to get the position RoPE sees (0 for text).
        reach: cells of a slot that drafters look at, in steps of a fixed shape; None for as many as the longest request
            needs, which the device must be asked for.
    """

    slot: Tensor
    length: Tensor
    anchor: Tensor
    room: Tensor
    seed: Tensor
    rope: Tensor
    reach: int | None = None

    def __len__(self) -> int:
        return self.slot.shape[0]


@dataclass(frozen=True, slots=True)
class Proposal(Record):
    """The distribution sampled drafts were drawn from, for rejection sampling.

    Attributes:
        probability: float32 [B, N, C], probabilities of C candidates at each node.
        ids: int64 [B, N, C], their token ids; None when C = V.
    """

    probability: Tensor
    ids: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Drafts(Record):
    """What a drafter proposes: of each request a chain, or a tree whose nodes stand from the likeliest to the least.

    A node's survival is the probability that all tokens from the anchor to it hold. It never rises along a row, so any
    first nodes of a row are a tree of their own, and cutting needs to know nothing of trees.

    Attributes:
        token: int64 [B, N], drafted token of each node.
        count: int64 [B], how many nodes of the row are real: nodes 0 .. count-1.
        confidence: float32 [B, N], a node's survival over that of the node before it in the row. In a chain that is the
            probability the drafter gives its token, given that those before it hold.
        parent: int64 [B, N], node it follows, an earlier one; -1 is the anchor. None for chains.
        proposal: the distribution the tokens were drawn from; None for greedy drafts.
    """

    token: Tensor
    count: Tensor
    confidence: Tensor
    parent: Tensor | None = None
    proposal: Proposal | None = None

    @staticmethod
    def chain(token: Tensor, confidence: Tensor, count: Tensor | None = None) -> Drafts:
        """Returns drafts in which every node follows the one before it.

        Args:
            token: int64 [B, D].
            confidence: float32 [B, D].
            count: int64 [B], real drafts a row; all D when None.
        """
        rows, depth = token.shape
        return Drafts(token, token.new_full((rows,), depth) if count is None else count, confidence)

    def first(self, depth: int) -> Drafts:
        """Returns the first `depth` nodes of each request."""
        token, confidence = self.token[:, :depth], self.confidence[:, :depth]
        parent = None if self.parent is None else self.parent[:, :depth]
        return Drafts(token, self.count.clamp_max(depth), confidence, parent, self.proposal)


@dataclass(frozen=True, slots=True)
class Scores(Record):
    """How likely each drafted position is to be committed (the paper's equation 3).

    Attributes:
        survival: float32 [B, N], product of the confidences up to the node; 0 where there is no draft, so a sum over
            any first nodes of each row is the number of drafts expected to be committed from them.
        valid: bool [B, N], nodes that may be kept: real, and within the request's room.
    """

    survival: Tensor
    valid: Tensor


@dataclass(frozen=True, slots=True)
class Cut(Record):
    """Which drafts stay.

    Attributes:
        keep: bool [B, N], a prefix of each row.
        total: T, packed tokens: B anchors and the kept drafts.
        budget: the ratio that was chosen, of all B (D+1) positions.
        offered: valid drafts of each request.
        promised: the sum of the survivals of the kept drafts: how many of them should hold.
    """

    keep: Tensor
    total: int
    budget: float
    offered: tuple[int, ...]
    promised: float = 0.0


@dataclass(frozen=True, slots=True)
class Packed(Record):
    """The one row of T tokens the target runs on: requests one behind the other, anchor first, then kept drafts.

    Rows of a prompt that is being read look the same; only their count differs.

    Attributes:
        token: int64 [T].
        slot: int64 [T], slot whose K/V the token reads and extends.
        cell: int64 [T], where in the slot its K/V are stored.
        position: int64 [T], or [3, T] for images: what RoPE sees. Siblings of a tree share one, and images shift it.
        node: int64 [T], node of the draft; -1 for an anchor or a prompt token.
        start: int32 [R+1], where each of the R requests of the row begins.
        used: int32 [R], cells of its slot that hold K/V once the row is stored.
        logit_rows: int64 [L], packed rows whose logits are needed.
        decoding: how many of the R requests decode; they come first and lie in slots 0 .. decoding-1. The others read
            their prompts.
        slots, reach, width: numbers known on the host, so that no stage has to ask the device: slots in use, cells any
            of them reaches at most, most rows of one decoding request.
        ancestors: bool [rows that decode, N+1], which rows of its own request a token may see; None for chains, where
            it sees all rows up to itself.
        fixed: whether T is given beforehand, so that nothing of the row may be read on the host until it has run. Spare
            rows of the batch come last in it, and belong to nobody.
        place: where the row, then of whole prompts with images, lies in the batch of its call; None for text.
    """

    token: Tensor
    slot: Tensor
    cell: Tensor
    position: Tensor
    node: Tensor
    start: Tensor
    used: Tensor
    logit_rows: Tensor
    decoding: int
    slots: int
    reach: int
    width: int
    ancestors: Tensor | None = None
    fixed: bool = False
    place: Place | None = None

    def __len__(self) -> int:
        return self.token.shape[0]

    def text_cells(self) -> Tensor:
        """Returns where in its request's text each token stands, int64 [T]: its cell, but behind a fork of a tree."""
        if self.ancestors is None:
            return self.cell
        # A row sees itself and those before it; in a chain these are all rows of nodes -1 to its own.
        skipped = self.node[: len(self.ancestors)] + 2 - self.ancestors.sum(1)
        return self.cell - torch.nn.functional.pad(skipped, (0, len(self) - len(skipped)))

    def logit_spans(self) -> list[slice]:
        """Returns where each request's rows lie among the logits; an empty span for a prompt that goes on.

        Reads the row's bounds on the host.
        """
        start, wanted = self.start.tolist(), set(self.logit_rows.tolist())
        spans, row = [], 0
        for index, (first, end) in enumerate(pairwise(start)):
            count = end - first if index < self.decoding else int(end - 1 in wanted)
            spans.append(slice(row, row + count))
            row += count
        return spans


@dataclass(frozen=True, slots=True)
class Verified(Record):
    """A packed row that the target has run on.

    Attributes:
        packed: the row.
        cut: which drafts are in it; None in plain steps.
        proposal: the distribution they were drawn from, if they were.
        logits: [L, V] of `packed.logit_rows`.
        taps: [T, F] outputs of the tapped layers, or None.
        told, ratio: of a drafted step whose shape was fixed: what its cut is read from once it is over, float64
            [B, D+1], and the budget it was given; None in others.
        spare: rows of the batch that belonged to nobody.
        likeliest: the verdict where the likeliest tokens are the target's; None where it has not been given yet.
    """

    packed: Packed
    cut: Cut | None
    proposal: Proposal | None
    logits: Tensor
    taps: Tensor | None
    told: Tensor | None = None
    ratio: float | None = None
    spare: int = 0
    likeliest: Verdict | None = None


@dataclass(frozen=True, slots=True)
class Choice(Record):
    """What the target chose after each row whose logits are there.

    Attributes:
        token: int64 [L]; -1 after rows that were not looked at, since a draft before them was rejected.
        scores: float32 [L, V], processed scores it was chosen by.
        logprobs: float32 [L], log-probability of the token under these scores; None when nobody asked for it.
    """

    token: Tensor
    scores: Tensor
    logprobs: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Verdict(Record):
    """What the target says of each request's rows.

    Attributes:
        accepted: int64 [R], drafts the target agrees with.
        next: int64 [R], the target's own token after them.
        path: int64 [decoding, D+1], packed rows that were accepted, anchor first; -1 beyond them.
    """

    accepted: Tensor
    next: Tensor
    path: Tensor


@dataclass(frozen=True, slots=True)
class Committed(Record):
    """The rows of a step that are now part of a request, for the drafter's context.

    Attributes:
        slot, cell, position, token: int64 [A], as in `Packed`.
        taps: [A, F] hidden states of the tapped target layers, side by side; None when no layer is tapped.
        kept, accepted, added: host numbers of the step's R requests, in its order: drafts verified, drafts committed,
            tokens committed. A request that reads its prompt has no drafts.
        finished: indices of the requests that are done.
    """

    slot: Tensor
    cell: Tensor
    position: Tensor
    token: Tensor
    taps: Tensor | None
    kept: tuple[int, ...]
    accepted: tuple[int, ...]
    added: tuple[int, ...]
    finished: tuple[int, ...]
