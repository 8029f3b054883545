"""`Ranks`: the processes that hold one model together by tensor parallelism, and what they must agree on.

Each of them takes every step on its part of the weights, so all must choose the same tokens, budgets and ends: one that
goes another way leaves the others waiting in the next forward. What could differ, by a rounding, a clock or a random
number, is decided by the first process and broadcast. What must be equal to begin with is compared (`check`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation import StopStringCriteria

if TYPE_CHECKING:
    from hf_dcut.requests import Request

Value = TypeVar("Value")
# What Transformers and Accelerate call dimensions of a device mesh: layers are split along one, copied along the other.
TENSOR_PARALLEL, REPLICAS = "tp", "dp_replicate"


class Ranks:
    """The processes that run one model together; on its own, this process alone.

    Args:
        group: their process group; None for one process.
        device: where their tensors lie.

    Attributes:
        size: how many they are.
        index: which of them this is.
    """

    def __init__(self, group: distributed.ProcessGroup | None = None, device: torch.device | str = "cpu"):
        self.group, self.device = group, device
        self.size = 1 if group is None else distributed.get_world_size(group)
        self.index = 0 if group is None else distributed.get_rank(group)

    @classmethod
    def of(cls, model: PreTrainedModel) -> Ranks:
        """Returns the processes over which a model's weights are split.

        Raises:
            ValueError: it is split in another way than by tensor parallelism, unevenly, or its process group is gone.
        """
        from torch.distributed.tensor import DTensor

        weights = [weight for weight in model.parameters() if isinstance(weight, DTensor)]
        if not weights:
            return cls()
        name = type(model).__name__
        if not distributed.is_initialized():
            raise ValueError(
                f"{name} was loaded in several processes, whose process group is gone: generate before "
                "torch.distributed.destroy_process_group(), or load the model again"
            )
        meshes = {weight.device_mesh for weight in weights}
        split = {d for mesh in meshes for d, n in zip(_dimensions(mesh), mesh.shape, strict=True) if n > 1}
        if split - {TENSOR_PARALLEL, REPLICAS}:
            raise ValueError(
                f"{name} has weights split over the mesh dimensions {sorted(split)}: dcut runs whole models, and "
                f"those split over {TENSOR_PARALLEL!r}. Load it with distributed_config=DistributedConfig(tp_size=N)"
            )
        parallel = [mesh for mesh in meshes if TENSOR_PARALLEL in _dimensions(mesh)]
        if not parallel:
            return cls()
        mesh = min(parallel, key=lambda mesh: mesh.ndim)
        ranks = cls(mesh.get_group(TENSOR_PARALLEL), weights[0].device)
        if any(isinstance(w, DTensor) for n, w in model.named_parameters() if ".k_proj." in n):
            _check_heads(model, ranks.size)
        return ranks

    @property
    def leader(self) -> int:
        """Number of the first of these processes among all that were launched; 0 for a process alone."""
        return 0 if self.group is None else distributed.get_global_rank(self.group, 0)

    def agree(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Returns the first process's tensors, in one broadcast. All have the same shapes and dtypes everywhere."""
        if self.size == 1:
            return tensors
        flat = torch.cat([tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors]).to(self.device)
        distributed.broadcast(flat, group=self.group, group_src=0)
        parts = flat.split([tensor.numel() * tensor.itemsize for tensor in tensors])
        return tuple(
            # Cut out, since a view of other items must begin where one of them can.
            part.clone().view(tensor.dtype).view(tensor.shape).to(tensor.device)
            for part, tensor in zip(parts, tensors, strict=True)
        )

    def number(self, value: float) -> float:
        """Returns the first process's number."""
        return float(self.agree(torch.tensor(value, dtype=torch.float64))[0])

    def clock(self) -> float:
        """Returns the seconds of the first process's clock, so that what is timed is timed alike everywhere."""
        return self.number(time.perf_counter())

    def share(self, make: Callable[[], Value]) -> Value:
        """Returns what a function gives in the first process; it is not called in the others."""
        if self.size == 1:
            return make()
        held = [make() if self.index == 0 else None]
        distributed.broadcast_object_list(held, group=self.group, group_src=0, device=torch.device(self.device))
        return held[0]  # type: ignore[return-value]

    def least(self, value: int) -> int:
        """Returns the smallest of the processes' numbers."""
        if self.size == 1:
            return value
        smallest = torch.tensor(value, device=self.device)
        distributed.all_reduce(smallest, distributed.ReduceOp.MIN, group=self.group)
        return int(smallest)

    def check(self, facts: Mapping[str, object]) -> None:
        """Raises ValueError in all processes, naming what differs between them, unless all have the same facts.

        Args:
            facts: by name, the same names everywhere; compared as they print.
        """
        if self.size == 1:
            return
        digests = [hashlib.sha256(repr(fact).encode()).digest()[:8] for fact in facts.values()]
        own = torch.tensor([int.from_bytes(d, "big", signed=True) for d in digests], device=self.device)
        every = [torch.empty_like(own) for _ in range(self.size)]
        distributed.all_gather(every, own, group=self.group)
        equal = torch.stack(every).eq(own).all(dim=0).tolist()
        apart = {name: fact for (name, fact), same in zip(facts.items(), equal, strict=True) if not same}
        # The same in all processes: what differs between two of them differs from somebody's in each.
        if not all(equal):
            held: list[Any] = [None] * self.size
            distributed.all_gather_object(held, apart, group=self.group)
            told = "; ".join(f"{name}: {_told([others[name] for others in held])}" for name in apart)
            raise ValueError(
                f"the {self.size} processes that hold this model together were given different things. {told}. Call "
                "with the same arguments in all of them, in the same environment"
            )

    def seeded(self, requests: Iterable[Request]) -> list[Request]:
        """Returns the requests with the seeds that they have in the first process."""
        requests = list(requests)
        (seeds,) = self.agree(torch.tensor([request.seed for request in requests], dtype=torch.int64))
        for request, seed in zip(requests, seeds.tolist(), strict=True):
            request.seed = seed
        return requests

    def agreed(self, criteria: StoppingCriteriaList) -> StoppingCriteriaList:
        """Returns criteria whose answer is the first process's, where it may depend on more than the text."""
        if self.size == 1 or all(type(criterion) is StopStringCriteria for criterion in criteria):
            return criteria
        return StoppingCriteriaList([_Agreed(criteria, self)])


class _Agreed(StoppingCriteria):
    """Criteria of which the first process decides whether they are met: a clock differs from process to process."""

    def __init__(self, criteria: StoppingCriteriaList, ranks: Ranks):
        self.criteria, self.ranks = criteria, ranks

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Returns which rows end, bool [B]."""
        met = torch.as_tensor(self.criteria(input_ids, scores, **kwargs), device=input_ids.device)
        return self.ranks.agree(met)[0]


def settings(options: object) -> dict[str, object]:
    """Returns the numbers, strings and switches among options: a `GenerationConfig`, a dict, or None.

    Other things may print differently in each process.
    """
    fields = options if isinstance(options, dict) else getattr(options, "__dict__", {})
    return {k: v for k, v in sorted(fields.items()) if isinstance(v, str | int | float) and not k.startswith("_")}


def _dimensions(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or ("unnamed",) * mesh.ndim


def _check_heads(model: PreTrainedModel, size: int) -> None:
    """Raises ValueError unless every process has as many attention heads as the others."""
    config = model.config.get_text_config(decoder=True)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if heads is not None and heads % size:
            fitting = [n for n in range(2, heads + 1) if not heads % n]
            raise ValueError(
                f"tp_size={size} does not divide {name}={heads} of {type(model).__name__}: give a tp_size that divides "
                f"both numbers of heads ({', '.join(map(str, fitting)) or 'none'} for this one), or load it whole"
            )


def _told(facts: Sequence[Any]) -> str:
    """Returns what each process has, of dicts only what differs."""
    if all(isinstance(fact, dict) for fact in facts):
        keys = sorted({key for fact in facts for key in fact})
        apart = [key for key in keys if any(fact.get(key) != facts[0].get(key) for fact in facts)]
        facts = [{key: fact.get(key) for key in apart} for fact in facts]
    texts = [repr(fact) for fact in facts]
    shown = [text if len(text) <= 80 else f"{text[:77]}..." for text in texts]
    return ", ".join(f"process {number} has {text}" for number, text in enumerate(shown))
