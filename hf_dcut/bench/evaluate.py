"""`hf-dcut evaluate`: how many drafts of each drafter a target accepts, and whether their confidences tell which."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_dcut.bench.calibration import mean_curve, of_replay, plot, table
from hf_dcut.bench.prompts import encode_each, read_prompts
from hf_dcut.bench.replay import Replay, replay
from hf_dcut.drafters import AutoDrafter
from hf_dcut.drafters.prompt_lookup import PromptLookupDrafter
from hf_dcut.drafters.training.answers import Answer, without_loop
from hf_dcut.regeneration import AnswerFile


@dataclass(frozen=True)
class Plan:
    """What to evaluate.

    Attributes:
        target: folder or Hub id of the model.
        drafters: as of `AutoDrafter.named`; prompt lookup is always measured beside them.
        data: names of shipped prompt sets, or JSON-lines files.
        prompts: the first so many of each; None for all.
        max_new_tokens: of each answer.
        keep_loops: whether text counts from where eight tokens in a row come for the third time.
        slots: answers at once.
        dtype: of the target.
        answers: folder for the target's answers, which later evaluations of other drafters use again; None keeps none.
        out: JSON file for the numbers; None writes none.
        plot: image file for the reliability curves; None draws none.
    """

    target: str
    drafters: tuple[str, ...]
    data: tuple[str, ...] = ("gsm8k",)
    prompts: int | None = 32
    max_new_tokens: int = 256
    keep_loops: bool = False
    slots: int = 32
    dtype: str = "auto"
    answers: Path | None = None
    out: Path | None = None
    plot: Path | None = None


def evaluate(plan: Plan) -> list[dict[str, Any]]:
    """Returns the numbers of each drafter on each prompt set, after printing a table of them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(plan.target)
    model = AutoModelForCausalLM.from_pretrained(plan.target, dtype=plan.dtype).eval().to(device)
    drafters = {name: AutoDrafter.named(name, device=device) for name in plan.drafters}
    for drafter in drafters.values():
        drafter.check(model)
    drafters["prompt lookup"] = PromptLookupDrafter()
    rows, replays = [], dict[str, list[Replay]]()
    for data in plan.data:
        answers = _answers(plan, model, tokenizer, data)
        for name, drafter in drafters.items():
            steps = replay(drafter, model, answers, plan.slots)
            replays.setdefault(name, []).append(steps)
            rows.append({"data": Path(data).stem, "drafter": name, **numbers(steps), "answers": len(answers)})
    print(report(rows))
    if plan.plot is not None:
        plot({name: mean_curve(steps) for name, steps in replays.items()}, plan.plot)
    if plan.out is not None:
        plan.out.parent.mkdir(parents=True, exist_ok=True)
        settings = {k: str(v) for k, v in vars(plan).items()}
        plan.out.write_text(json.dumps({"plan": settings, "results": rows}, indent=1) + "\n")
    return rows


def numbers(steps: Replay) -> dict[str, Any]:
    """Returns what a replay came to, JSON-able: tokens a step, acceptance of each place, calibration of each place."""
    return {
        "tokens_per_step": steps.tokens_per_step,
        "steps": len(steps.right),
        "place_acceptance": steps.place_acceptance,
        "calibration": table(of_replay(steps)),
    }


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a Markdown table, one line a prompt set and drafter.

    "tokens a step" includes the target's own; "accepted at 1, 2, 3, 4" is the share of steps that got so far.
    """
    lines = [
        "| data | drafter | answers | steps | tokens a step | accepted at 1, 2, 3, 4 | AUROC | Spearman | ECE |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        places = ", ".join(f"{share:.2f}" for share in row["place_acceptance"][:4])
        overall = row["calibration"][0]
        ranks = " | ".join("-" if overall[k] is None else f"{overall[k]:.3f}" for k in ("auroc", "spearman", "ece"))
        head = f"| {row['data']} | {row['drafter']} | {row['answers']} | {row['steps']} "
        lines.append(f"{head}| {row['tokens_per_step']:.2f} | {places} | {ranks} |")
    return "\n".join(lines)


def _answers(plan: Plan, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: str) -> list[Answer]:
    """Returns the target's answers to a prompt set, without what loops."""
    prompts, name = encode_each(tokenizer, read_prompts(data)[: plan.prompts]), Path(data).stem
    with ExitStack() as stack:
        folder = plan.answers or Path(stack.enter_context(TemporaryDirectory()))
        file = AnswerFile(folder / f"{name}-{plan.max_new_tokens}.jsonl")
        new = file.complete(model, prompts, plan.max_new_tokens, plan.slots)
        for _ in tqdm(new, desc=f"answers to {name}", unit="answer", leave=False, disable=None):
            pass
    found = file.in_order(prompts)
    return found if plan.keep_loops else [without_loop(answer) for answer in found]
