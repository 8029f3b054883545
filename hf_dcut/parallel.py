"""Data parallelism: replicas of a model that share the inputs of one batch job, each a process or several.

A replica whose model is split over processes (`ranks.py`) counts once: these all answer the same share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from transformers import PreTrainedModel

from hf_dcut.ranks import Ranks
from hf_dcut.seeds import Seeds

Item = TypeVar("Item")


class Replicas:
    """The replicas of a job.

    Args:
        model: this process's, or its part of it.
        accelerator: of the processes that were launched; None for a job of one replica.

    Raises:
        TypeError: something else than an `Accelerator`.
        ValueError: it knows of one process, and the model lies in several.
    """

    def __init__(self, model: PreTrainedModel, accelerator: Accelerator | None = None):
        if accelerator is not None and not isinstance(accelerator, Accelerator):
            raise TypeError(f"accelerator is a {type(accelerator).__name__}: give an accelerate.Accelerator, or None")
        self.accelerator, self._index, self._leaders, self._speaks = accelerator, 0, [0], True
        if accelerator is None:
            return
        ranks = Ranks.of(model)
        if ranks.size > accelerator.num_processes:
            raise ValueError(
                f"accelerator knows of {accelerator.num_processes} process and the model lies in {ranks.size}: make "
                "the Accelerator before the model is loaded, with cpu=True where there is no GPU"
            )
        leader = accelerator.process_index if ranks.group is None else ranks.leader
        self._leaders = sorted(set(gather_object([leader])))
        self._index, self._speaks = self._leaders.index(leader), leader == accelerator.process_index

    @property
    def main(self) -> bool:
        """Whether this process is the one that speaks for all."""
        return self.accelerator is None or bool(self.accelerator.is_main_process)

    def share(self, items: Sequence[Item]) -> list[Item]:
        """Returns what this replica answers: every n-th, so that sorted inputs are spread over the n replicas."""
        return list(items[self._index :: len(self._leaders)])

    def seed(self, seed: int | None) -> int | None:
        """Returns the seed of the whole job: as given, or the main process's draw where there are several replicas."""
        if seed is not None or len(self._leaders) == 1:
            return seed
        held = [Seeds().draw(1)[0]]
        broadcast_object_list(held)
        return held[0]

    def gather(self, results: Mapping[str, Item]) -> dict[str, Item]:
        """Returns the results of all replicas, in all processes."""
        if len(self._leaders) == 1:
            return dict(results)
        return dict(gather_object(list(results.items()) if self._speaks else []))
