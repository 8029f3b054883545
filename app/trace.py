"""`Trace`: what the steps of a run did. Records that are drawn by the panels and saved as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from hf_dcut.app.curve import Curve


@dataclass(frozen=True, slots=True)
class Draft:
    """One drafted token.

    Attributes:
        token, text: what was drafted.
        parent: place of the draft it follows in the request's row, which in a tree need not be the one before; -1 is
            the anchor.
        confidence: probability the drafter gives it, given that those it follows hold.
        survival: product of the confidences of those it follows and its own: probability that it is committed.
        kept: whether it was verified.
        accepted: whether the target agreed.
    """

    token: int
    text: str
    parent: int
    confidence: float
    survival: float
    kept: bool
    accepted: bool


@dataclass(frozen=True, slots=True)
class Row:
    """What one step did for one request.

    Attributes:
        request: its number, from 0.
        drafts: what was drafted for it; empty in plain steps.
        own: text of the target's own token, "" when the request ended before it.
        ended: whether the request ended in this step.
    """

    request: int
    drafts: tuple[Draft, ...]
    own: str
    ended: bool

    @property
    def kept(self) -> int:
        """Drafts that were verified."""
        return sum(draft.kept for draft in self.drafts)

    @property
    def accepted(self) -> int:
        """Drafts that were committed."""
        return sum(draft.accepted for draft in self.drafts)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of all requests that were decoding.

    Attributes:
        rows: one a request.
        budget: the share of positions that was chosen; None in plain steps.
        verified, offered: positions, anchors included: T, and all B (D+1).
        seconds: of the whole step.
        new_tokens: committed by it, first tokens after a prompt included.
        curve: what each budget promised; None in plain steps and without a cost table.
    """

    rows: tuple[Row, ...]
    budget: float | None
    verified: int
    offered: int
    seconds: float
    new_tokens: int
    curve: Curve | None


@dataclass(frozen=True, slots=True)
class Piece:
    """A committed token: its text, and whether it was drafted rather than the target's own."""

    token: int
    text: str
    drafted: bool


@dataclass
class Answer:
    """One request and its text so far.

    Attributes:
        prompt: as typed.
        pieces: its tokens.
        finish_reason: "eos" or "length"; None while it runs.
    """

    prompt: str
    pieces: list[Piece] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def tokens(self) -> list[int]:
        """Ids of what was generated."""
        return [piece.token for piece in self.pieces]


@dataclass
class Trace:
    """A run so far.

    Attributes:
        method: its name in words: "D-cut", "verify everything", "plain".
        depth: D, drafts a request and step; 0 in plain decoding.
        new_tokens: most tokens of a request.
        answers: one a request.
        steps: decoding steps, in order.
        seconds: that the engine worked, prompts included.
        stopped: whether it ended before its requests did.
        settings: what the run was asked for, JSON-able.
    """

    method: str
    depth: int
    new_tokens: int
    answers: list[Answer]
    steps: list[Step] = field(default_factory=list)
    seconds: float = 0.0
    stopped: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """Whether nothing is left to generate."""
        return all(answer.finish_reason for answer in self.answers)

    @property
    def longest(self) -> int:
        """Tokens of the longest answer: steps that plain decoding takes, and one for the prompt."""
        return max(len(answer.pieces) for answer in self.answers)

    @property
    def telling(self) -> int | None:
        """The step with the most drafts, from 0, the last of several: where the cut is seen best; None before any."""
        drafts = [(sum(len(row.drafts) for row in step.rows), index) for index, step in enumerate(self.steps)]
        return max(drafts)[1] if drafts else None

    @property
    def tokens(self) -> int:
        """Generated so far, of all requests."""
        return sum(len(answer.pieces) for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        """Over the seconds that the engine worked; 0 before the first."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def drafted(self) -> int:
        """Drafts that were made."""
        return sum(len(row.drafts) for step in self.steps for row in step.rows)

    @property
    def kept(self) -> int:
        """Drafts that were verified."""
        return sum(row.kept for step in self.steps for row in step.rows)

    @property
    def accepted(self) -> int:
        """Drafts that were committed."""
        return sum(row.accepted for step in self.steps for row in step.rows)

    @property
    def cut_share(self) -> float:
        """Drafts that were never verified, of all; 0 without drafts."""
        return 1 - self.kept / self.drafted if self.drafted else 0.0

    @property
    def tokens_a_step(self) -> float:
        """Tokens a request and step; 0 before the first step."""
        rows = sum(len(step.rows) for step in self.steps)
        return (rows + self.accepted) / rows if rows else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns everything, JSON-able."""
        sums = ("tokens", "tokens_per_second", "drafted", "kept", "accepted", "cut_share", "tokens_a_step")
        return {**asdict(self), "sums": {name: getattr(self, name) for name in sums}}


def disagreement(left: Answer, right: Answer) -> int | None:
    """Returns where two answers first differ, counted in tokens from 0; None when they are equal."""
    pairs = zip(left.tokens, right.tokens, strict=False)
    differing = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if differing is None and len(left.tokens) != len(right.tokens):
        return min(len(left.tokens), len(right.tokens))
    return differing
