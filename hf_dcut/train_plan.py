"""`TrainPlan`: what `train` is asked for, and its checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hf_dcut.drafters.training.recipe import Recipe


@dataclass(frozen=True)
class TrainPlan:
    """What to train.

    Attributes:
        target: folder or Hub id of the model to draft for.
        out: folder for the drafter.
        prompts: JSON-lines file or shipped prompt set that the target answers; None when only `answers` are used.
        answers: files of answers that the target gave before.
        start: "random", "target" (copies of its last layers), or a drafter's folder or Hub id, whose shape is kept.
        layers: of the drafter; 5 when None.
        block_size: the anchor and the drafts after it; when None 16, or that of the drafter that is started from.
        taps: target layers it reads; None spreads five over the target.
        mask_token_id: token that stands where a draft is wanted; None takes a special token that no answer holds.
        draft_vocab_size: drafts only so many of the answers' most frequent tokens; None drafts all tokens.
        max_new_tokens, max_prompt_tokens: of an answer; longer prompts are left out.
        slots: answers in work at once.
        held_out: share of the answers that is measured on, not trained on.
        keep_loops: whether answers keep what follows once eight tokens in a row come for the third time.
        recipe: the numbers of training.
        time_budget: seconds for everything; training then stops in time. None for no limit.
        work: folder for answers, taps and the state; `out`/work when None.
        resume: go on with the run in `work`.
        dtype: of the target.
        command: how this was asked for, for the card.
    """

    target: str
    out: Path
    prompts: str | None = None
    answers: tuple[Path, ...] = ()
    start: str = "random"
    layers: int | None = None
    block_size: int | None = None
    taps: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    draft_vocab_size: int | None = None
    max_new_tokens: int = 256
    max_prompt_tokens: int = 512
    slots: int = 32
    held_out: float = 0.02
    keep_loops: bool = False
    recipe: Recipe = field(default_factory=Recipe)
    time_budget: float | None = None
    work: Path | None = None
    resume: bool = False
    dtype: str = "auto"
    command: str | None = None

    def __post_init__(self) -> None:
        if self.prompts is None and not self.answers:
            raise ValueError("nothing to train on: give prompts, answers, or both")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out={self.held_out!r}: give a share in [0, 1), such as 0.02")
        for name in ("layers", "max_new_tokens", "max_prompt_tokens", "slots"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value!r}: give a positive integer")
        shape = ("layers", "taps", "mask_token_id", "draft_vocab_size")
        given = [name for name in shape if getattr(self, name) is not None]
        if given and not self.fresh:
            raise ValueError(
                f"start={self.start!r} keeps the shape of that drafter: leave out {', '.join(given)}, or start from "
                "'random' or 'target'"
            )
        if self.recipe.steps is None and self.time_budget is None:
            raise ValueError("recipe.steps=None needs a time_budget: give one of them, or training never ends")

    @property
    def fresh(self) -> bool:
        """Whether training makes a drafter of its own shape rather than going on from one."""
        return self.start in ("random", "target")
