"""`DCutConfig`: every knob of `generate(..., dcut=...)`, its default and its check."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_dcut.cost_table import CostTable

PAPER_RATIOS = (0.25, 0.5, 0.75, 1.0)
# Nodes of a tree that nobody set: small blocks leave room for more than they have places.
LEAST_NODES = 15
RATIOS = tuple(share / 16 for share in range(1, 17))


@dataclass(frozen=True)
class DCutConfig:
    """How drafts are cut.

    Attributes:
        budget: "auto" picks the share of positions with the most expected tokens per second at every step (paper,
            equation 5) and skips drafting while it does not pay; "none" is plain decoding on the same engine; a float
            in (0, 1] verifies that share of all B (D+1) positions; 1.0 verifies every draft.
        ratios: shares that "auto" chooses from; None for sixteenths, or for the paper's quarters where steps are CUDA
            graphs, of which there is one for each.
        proposals: "greedy" drafts the drafter's likeliest tokens, which the target's draws must then hit; "sampled"
            draws drafts from the drafter's own distribution and verifies them by rejection sampling. Same law either
            way; only sampling requests and block drafters know the second.
        draft_tree: True verifies trees of drafts: less likely tokens of a place and the drafts of several drafters
            compete for the budget too. "auto" does so where it can be: with DFlash drafters that fill all places at
            once, also beside prompt lookup, for models with full attention whose steps are not recorded, and steps
            whose requests' processors look at scores alone. A number says how many nodes a request's tree has. False
            verifies chains.
        draft_tokens: most drafts of a request and step: the first so many of a block, or nodes of a tree. None keeps
            all of a block, and gives a tree as many nodes, 15 at least.
        cost_table: where the measured seconds of a step are kept: "auto" for a file in the Hugging Face cache, a path,
            "off" to measure for this call alone, or a `CostTable` from `hf_dcut.warmup`.
        deterministic: True takes the cost table as it is, and forgets what drafting gained in the last call; False lets
            both follow the steps they see.
        max_prefill_tokens: prompt tokens read in one step at most; longer prompts are read in chunks.
        max_cache_bytes: what the slot caches may take; None allows what the device has free.
        cuda_graphs: True records steps as CUDA graphs before the first one, or raises where that cannot be; "auto" does
            so where it can be and a request may have so many new tokens that it should pay; False never does.
        cuda_graph_batch_sizes: numbers of requests to record steps of, those beyond a call's slots left out; others run
            as the next larger one, or eagerly. None for powers of two and the number of slots.
        cuda_graph_budget: where the budget of a recorded step comes from, if there is one to choose: "last" from the
            drafts of the last step, so that a step is one launch; "read" from its own, which the host reads as one
            number between two launches.
        prepack: on a CPU, "auto" lays the weights of linear layers out for oneDNN, a copy for the time of the call,
            where it takes a quarter of the free memory at most and a request may have twelve new tokens; True does so
            anyway, or raises where no layer can be; False leaves them. Beside `compile` it is the head's alone.
        compile: True runs norms and MLPs of decoder layers, the model's and a DFlash drafter's, fused by torch.compile
            for the time of the call; the first such call of a process compiles for a minute.
    """

    budget: float | str = "auto"
    ratios: tuple[float, ...] | None = None
    proposals: str = "greedy"
    draft_tree: bool | int | str = "auto"
    draft_tokens: int | None = None
    cost_table: str | os.PathLike[str] | CostTable = "auto"
    deterministic: bool = False
    max_prefill_tokens: int = 4096
    max_cache_bytes: int | None = None
    cuda_graphs: bool | str = "auto"
    cuda_graph_batch_sizes: tuple[int, ...] | None = None
    cuda_graph_budget: str = "last"
    prepack: bool | str = "auto"
    compile: bool = False

    def __post_init__(self) -> None:
        check_budget(self.budget)
        self._take_several("ratios", _is_ratio, f"numbers in (0, 1], such as {PAPER_RATIOS}")
        self._take_several("cuda_graph_batch_sizes", _is_count, "positive integers, such as (1, 4, 16)")
        for name, allowed in (("proposals", ("greedy", "sampled")), ("cuda_graph_budget", ("last", "read"))):
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"dcut {name}={value!r}: give {' or '.join(map(repr, allowed))}")
        for name in ("draft_tokens", "max_prefill_tokens", "max_cache_bytes"):
            value = getattr(self, name)
            optional = name != "max_prefill_tokens"
            if not (optional and value is None) and not _is_count(value):
                wanted = "a positive integer" + (" or None" if optional else "")
                raise ValueError(f"dcut {name}={value!r}: give {wanted}")
        for name in ("deterministic", "compile"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"dcut {name}={value!r}: give True or False")
        for name in ("draft_tree", "cuda_graphs", "prepack"):
            value, numbered = getattr(self, name), name == "draft_tree"
            if not isinstance(value, bool) and value != "auto" and not (numbered and _is_count(value)):
                wanted = "'auto', True, False or a positive integer" if numbered else "'auto', True or False"
                raise ValueError(f"dcut {name}={value!r}: give {wanted}")
        # Tables come after this module, so one is known by what the budget asks of it.
        if not isinstance(self.cost_table, (str, os.PathLike)) and not hasattr(self.cost_table, "drafted"):
            raise TypeError(f"dcut cost_table={self.cost_table!r}: give 'auto', 'off', a path or a CostTable")

    def _take_several(self, name: str, right: Callable[[object], bool], wanted: str) -> None:
        """Makes a tuple of an option that has several values, after checking each."""
        value = getattr(self, name)
        if value is None:
            return
        if not isinstance(value, (list, tuple)) or not value or not all(map(right, value)):
            raise ValueError(f"dcut {name}={value!r}: give one or more {wanted}, or None")
        object.__setattr__(self, name, tuple(value))

    def nodes(self, depth: int) -> int:
        """Returns N, how many nodes a tree has: as many as a cost table that was handed over was measured for.

        Args:
            depth: D of the drafter.
        """
        if not isinstance(self.draft_tree, (bool, str)):
            return self.draft_tree
        return self.draft_tokens or getattr(self.cost_table, "draft_tokens", 0) or max(depth, LEAST_NODES)

    def candidates(self, recorded: bool = False) -> tuple[float, ...]:
        """Returns the shares that a drafted step chooses from; none where no step drafts.

        Args:
            recorded: whether steps are recorded as CUDA graphs.
        """
        if self.budget == "none":
            return ()
        if self.budget != "auto":
            return (float(self.budget),)
        return self.ratios or (PAPER_RATIOS if recorded else RATIOS)

    @classmethod
    def of(cls, value: object) -> DCutConfig:
        """Returns the config that a user's `dcut=` stands for: True, a budget, a dict or a `DCutConfig`.

        Raises:
            TypeError, ValueError: anything else, or a key that does not exist.
        """
        if isinstance(value, cls):
            return value
        if value is True:
            return cls()
        if isinstance(value, dict):
            return cls.from_dict(value)
        if isinstance(value, (str, float, int)) and not isinstance(value, bool):
            return cls(budget=value)
        raise TypeError(
            f"dcut={value!r}: give True, a budget ('auto', 'none' or a number in (0, 1]), a dict or a DCutConfig"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields that differ from their defaults, as JSON-able values."""
        if not isinstance(self.cost_table, (str, os.PathLike)):
            raise ValueError("a DCutConfig that holds a CostTable cannot be saved: give cost_table a path instead")
        default = asdict(DCutConfig())
        values = asdict(replace(self, cost_table=os.fspath(self.cost_table)))
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items() if v != default[k]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DCutConfig:
        """Returns a config with these fields set.

        Raises:
            ValueError: a key that is not a field.
        """
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"dcut has no option {', '.join(map(repr, unknown))}: the options are {', '.join(known)}")
        return cls(**values)


def check_budget(budget: object) -> None:
    """Raises ValueError unless `budget` is 'auto', 'none' or a number in (0, 1]."""
    if budget in ("auto", "none") or _is_ratio(budget):
        return
    raise ValueError(f"dcut budget={budget!r}: give 'auto', 'none' or a number in (0, 1]")


def _is_ratio(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
