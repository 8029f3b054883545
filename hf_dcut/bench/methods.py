"""What is compared: each method answers the same prompts, with the same options.

Ours keep the batch full: a request that finishes is replaced by the next prompt. Transformers' own are in `peers.py`.
How they are run is in `running.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import LogitsProcessorList, PreTrainedModel, TemperatureLogitsWarper

from hf_dcut.bench import peers
from hf_dcut.bench.policies import BUDGETS, rule_of
from hf_dcut.cost_table import CostTable
from hf_dcut.drafters.base import Drafter
from hf_dcut.drafters.dflash import DFlashDrafter
from hf_dcut.requests import Request
from hf_dcut.stats import Stats

# Methods of ours draft chains, as the paper's do; with the last before it, one drafts trees.
PLAIN, SHORT, TREE = "plain", "short-", "tree-"
# D-cut as the paper has it, and as `generate` runs it unless told otherwise.
AUTO, TREE_AUTO = "auto", "tree-auto"
DEFAULT_METHODS = (peers.GENERATE, PLAIN, *BUDGETS, TREE_AUTO)


@dataclass(frozen=True)
class Setting:
    """What all methods of a cell share.

    Attributes:
        model: the target.
        drafter: who proposes.
        batch: B, requests at once.
        max_new_tokens: of each.
        temperature: 0 decodes greedily.
        draft_tokens: D; the drafter's own when None.
        costs: of steps with this drafter.
        tree_costs: of steps whose drafts are trees.
        short: a drafter that is fed a block of only D tokens, and its costs; None when D is its own.
        assistant: a model for upstream's assisted decoding.
        width: tokens of the longest prompt of the cell.
    """

    model: PreTrainedModel
    drafter: Drafter
    batch: int
    max_new_tokens: int
    width: int
    temperature: float = 0.0
    draft_tokens: int | None = None
    costs: CostTable | None = None
    tree_costs: CostTable | None = None
    short: tuple[Drafter, CostTable] | None = None
    assistant: PreTrainedModel | None = None

    @property
    def eos(self) -> frozenset[int]:
        """Ids that end an answer."""
        ids = self.model.generation_config.eos_token_id
        return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])


@dataclass
class Outcome:
    """What a method made of some prompts.

    Attributes:
        seconds: of the whole call, prompts included.
        sequences: new tokens of each prompt, up to and with an end token.
        first_token: seconds to the first token, the median over the requests that need not wait; None if not known.
        peak_bytes: most memory in use; None if not known.
        stats: of our steps; None for upstream's methods.
        pulse: seconds of one and the same piece of work meanwhile, as in `pulse.py`; None for upstream's methods.
    """

    seconds: float
    sequences: list[list[int]]
    first_token: float | None
    peak_bytes: int | None
    stats: Stats | None
    pulse: float | None = None

    @property
    def tokens(self) -> int:
        """New tokens."""
        return sum(map(len, self.sequences))


def check_method(method: str) -> None:
    """Raises ValueError for a method that does not exist."""
    if method in peers.PEERS:
        return
    try:
        _, policy = rule_of(method.removeprefix(SHORT).removeprefix(TREE))
    except ValueError as error:
        others = f"{SHORT} or {TREE} before one of these, or one of {', '.join(peers.PEERS)}"
        raise ValueError(f"{error}, {others}") from None
    if TREE in method and (policy is not None or method == TREE + PLAIN or not method.startswith(TREE)):
        raise ValueError(f"method {method!r}: {TREE} goes before auto or a budget in (0, 1]")


def applies(method: str, setting: Setting) -> bool:
    """Returns whether a method can run in a cell: upstream assists one request at a time, a short block is shorter."""
    if method in peers.SINGLE:
        return setting.batch == 1
    return setting.short is not None or not method.startswith(SHORT)


def requests_of(setting: Setting, prompts: Sequence[list[int]], tokens: int | None = None) -> list[Request]:
    """Returns a request a prompt, each with its number as seed; `tokens` stand for the setting's new tokens."""
    warpers = LogitsProcessorList()
    if setting.temperature not in (0.0, 1.0):
        warpers.append(TemperatureLogitsWarper(setting.temperature))
    return [
        Request(
            id=number,
            prompt=prompt,
            max_new_tokens=setting.max_new_tokens if tokens is None else tokens,
            eos=setting.eos,
            seed=number,
            samples=setting.temperature > 0,
            processors=warpers,
        )
        for number, prompt in enumerate(prompts)
    ]


def drafts_of(drafter: Drafter, tree: bool, depth: int) -> dict[str, Any]:
    """Returns the options of a `DCutConfig` for D drafts; a tree of a whole block has as many nodes as by default."""
    return {"draft_tree": tree, "draft_tokens": None if tree and depth == drafter.draft_tokens else depth}


def shorter(drafter: Drafter, draft_tokens: int) -> DFlashDrafter:
    """Returns the drafter fed a block of `draft_tokens + 1`, which it was not trained on; weights are shared.

    Raises:
        ValueError: another kind of drafter.
    """
    if not isinstance(drafter, DFlashDrafter):
        raise ValueError(
            f"methods with {SHORT} feed a shorter block, which a {type(drafter).__name__} does not have: leave them out"
        )
    model = copy.copy(drafter.model)
    model.config = replace(model.config, block_size=draft_tokens + 1)
    return DFlashDrafter(model)
