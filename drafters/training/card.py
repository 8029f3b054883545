"""The model card of a trained drafter: README.md with the front matter that the Hub reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_dcut.drafters.dflash.config import DFlashConfig
from hf_dcut.drafters.training.recipe import Recipe
from hf_dcut.wording import counted


@dataclass(frozen=True)
class Facts:
    """What a card tells.

    Attributes:
        target: folder or Hub id of the target.
        prompts: where the prompts came from; None when answers were given.
        start: what training began with.
        command: how to make it again; None for a Python call.
        answers, answer_tokens, held_out: how much it was trained on, and how many answers were kept apart.
        steps, seconds: of training.
        tokens_per_step: on the held-out answers, everything verified, the target's own token included; None without.
        place_acceptance: share of steps that accepted the draft at each place and all before it.
    """

    target: str
    prompts: str | None
    start: str
    command: str | None
    answers: int
    answer_tokens: int
    held_out: int
    steps: int
    seconds: float
    tokens_per_step: float | None
    place_acceptance: Sequence[float]


def card(config: DFlashConfig, recipe: Recipe, facts: Facts) -> str:
    """Returns the text of README.md."""
    vocabulary = f"{config.draft_vocab_size:,} tokens" if config.draft_vocab_size else "the target's"
    shape = {
        "layers": config.num_hidden_layers,
        "block size (the anchor and the drafts after it)": config.block_size,
        "target layers read, from 0": ", ".join(map(str, config.target_layer_ids)),
        "mask token": config.mask_token_id,
        "draft vocabulary": vocabulary,
        "start": facts.start,
    }
    name = facts.target.rstrip("/").rsplit("/", 1)[-1]
    return "\n".join(
        [
            _front_matter(facts.target),
            f"# DFlash drafter for {name}",
            "",
            "Made with `hf-dcut train`, in z-lab's format. Embeddings and head are the target's.",
            "",
            *_table(shape),
            "",
            "## Training",
            "",
            *_training(recipe, facts),
            "",
            "## What to expect",
            "",
            *_expect(facts),
        ]
    )


def _front_matter(target: str) -> str:
    base = f"base_model: {target}\n" if _is_hub_id(target) else ""
    return f"---\nlibrary_name: hf-dcut\n{base}tags:\n- speculative-decoding\n- dflash\n- drafter\n---\n"


def _is_hub_id(target: str) -> bool:
    return target.count("/") == 1 and not target.startswith((".", "/", "models/"))


def _training(recipe: Recipe, facts: Facts) -> list[str]:
    source = f"to the prompts of `{facts.prompts}`" if facts.prompts else "that were given"
    lines = [
        f"On {facts.answers:,} greedy answers of the target ({facts.answer_tokens:,} tokens) {source}; "
        f"{facts.held_out} more were held out. {counted(facts.steps, 'step')} in "
        f"{counted(round(facts.seconds / 60), 'minute')}."
    ]
    if facts.command:
        lines += ["", f"    {facts.command}"]
    values: dict[str, Any] = recipe.to_dict()
    return [*lines, "", *_table({k: v for k, v in values.items() if k not in ("save_every", "evaluate_every")})]


def _expect(facts: Facts) -> list[str]:
    if facts.tokens_per_step is None:
        return ["It was not measured: no answers were held out.", ""]
    shares = ", ".join(f"{share:.2f}" for share in facts.place_acceptance)
    return [
        f"On the held-out answers, everything verified: {facts.tokens_per_step:.2f} tokens a step, the target's own "
        f"included. Share of steps that accept the draft at place 1, 2, ..: {shares}.",
        "",
        "The output is the target's in any case; what a poor draft costs is time.",
        "",
    ]


def _table(values: dict[str, Any]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in values.items())]
