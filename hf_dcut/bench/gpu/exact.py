"""Whether `generate(..., dcut=...)` says what plain `generate` says, on a random model in SmolLM2-135M's shape.

Its text depends on all that came before, so a wrong mask, position or cell shows. Ties are judged as everywhere else
(`lossless.py`); how many tokens of the plain answers were that close is told, since a difference there proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_dcut.bench import peers
from hf_dcut.bench.drafter import ORACLE_PROFILE
from hf_dcut.bench.gpu.clock import Clock
from hf_dcut.bench.gpu.rig import Rig, made_up_costs
from hf_dcut.bench.gpu.shapes import random_prompts, varied_model
from hf_dcut.bench.lossless import TIE, agreement
from hf_dcut.bench.policies import BUDGETS
from hf_dcut.config import DCutConfig
from hf_dcut.drafters.base import Drafter
from hf_dcut.drafters.oracle import OracleDrafter

_SHORTEST, _LONGEST = 3, 20
# The best budget for the step's own drafts, which a recorded step tells the host.
_READ = "auto, read"


def exact(rig: Rig, clock: Clock) -> dict[str, Any]:
    """Returns one entry for each dtype, drafter and budget, and whether no answer differs by more than a tie."""
    entries: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    close: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = varied_model(rig.sizes.varied, rig.device, dtype)
        prompts = random_prompts(rig.sizes.rows, _SHORTEST, _LONGEST, rig.sizes.varied["vocab_size"])
        options = peers.Options(len(prompts), rig.sizes.answer, 0.0, 0, None)
        _, plain, _ = peers.run(peers.GENERATE, model, prompts, options)
        close[str(dtype)] = _close(model, prompts, plain)
        for name, drafter in _drafters(rig, model, prompts, plain):
            for budget in ("none", *BUDGETS, _READ):
                what = {"dtype": str(dtype), "drafter": name, "budget": budget}
                if (why := clock.late()) is not None:
                    skipped.append({"what": " ".join(what.values()), "why": why})
                else:
                    entries.append({**what, **_compare(model, drafter, budget, prompts, plain)})
    passed = all(entry["mismatches"] == 0 for entry in entries)
    return {"entries": entries, "close_tokens": close, "passed": passed, "skipped": skipped}


def _drafters(
    rig: Rig, model: PreTrainedModel, prompts: Sequence[list[int]], plain: Sequence[list[int]]
) -> Iterator[tuple[str, Drafter]]:
    """Yields a drafter that is always wrong, and one that is wrong as often as a real one."""
    yield "untrained DFlash", rig.random_drafter(model)
    said = dict(zip(map(tuple, prompts), plain, strict=True))
    yield "oracle", OracleDrafter(said, rig.sizes.block - 1, ORACLE_PROFILE)


def _compare(
    model: PreTrainedModel, drafter: Drafter, budget: str, prompts: Sequence[list[int]], plain: Sequence[list[int]]
) -> dict[str, Any]:
    """Returns how the answers under a budget compare with the plain ones."""
    batch = peers.padded(prompts, model.device)
    share = "auto" if budget == _READ else budget if budget in ("none", "auto") else float(budget)
    costs, sizes = made_up_costs(len(prompts), drafter.draft_tokens), (len(prompts),)
    source = "read" if budget == _READ else "last"
    config = DCutConfig(
        budget=share,
        cost_table=costs,
        deterministic=True,
        cuda_graph_batch_sizes=sizes,
        cuda_graph_budget=source,
    )
    options = {"max_new_tokens": len(plain[0]), "do_sample": False, "return_dict_in_generate": True}
    out = model.generate(**batch, **options, assistant_model=drafter, dcut=config)
    ours = out.sequences[:, batch["input_ids"].shape[1] :].tolist()
    found = agreement(model, prompts, ours, plain).to_dict()
    return {**found, "accepted_a_step": out.stats.mean_accepted_tokens, "drafted_steps": out.stats.drafted_steps}


@torch.no_grad()
def _close(model: PreTrainedModel, prompts: Sequence[list[int]], plain: Sequence[list[int]]) -> float:
    """Returns the share of the plain answers' tokens whose two best are within a tie."""
    near = []
    for prompt, answer in zip(prompts, plain, strict=True):
        ids = torch.tensor([[*prompt, *answer]], device=model.device)
        best = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().topk(2).values
        near.append(best[:, 0] - best[:, 1] < TIE[model.dtype])
    return float(torch.cat(near).float().mean())
