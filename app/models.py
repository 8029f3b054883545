"""`Models`: the target and its drafters, loaded in a thread of their own, so that the page is there at once."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_dcut.assembly import warmup
from hf_dcut.bench.drafter import make_drafter
from hf_dcut.config import DCutConfig
from hf_dcut.cost_table import CostTable
from hf_dcut.drafters.base import Drafter
from hf_dcut.drafters.names import source_of
from hf_dcut.profiling import powers_of_two

# Tokens of the longest request for which steps are measured; one length serves all visitors.
_MEASURED_LENGTH = 256
_LOOKUP = "Prompt lookup (copies from the text)"


@dataclass
class Models:
    """A target and its drafters.

    Attributes:
        target: folder or Hub id of the model.
        drafters: as of `make_drafter`, such as a folder or Hub id, or "lookup" for prompt lookup.
        dtype: of the target; None takes float32 on a CPU, where it is faster and ties are rarer, else as saved.
        first_batch: requests for which steps are measured while the page is being read.
        cost_table: where measured seconds are kept, as in `DCutConfig`.
        stage: what is being done, in words for the visitor.
        error: why loading failed; None while it did not.
    """

    target: str
    drafters: Sequence[str]
    dtype: str | None = None
    first_batch: int = 8
    cost_table: str = "auto"
    stage: str = "not loaded"
    error: str | None = None
    model: PreTrainedModel = field(init=False, repr=False)
    tokenizer: PreTrainedTokenizerBase = field(init=False, repr=False)
    _loaded: dict[str, Drafter] = field(default_factory=dict, repr=False)
    _tables: dict[str, CostTable] = field(default_factory=dict, repr=False)
    _settled: threading.Event = field(default_factory=threading.Event, repr=False)
    _begin: float = 0.0

    @property
    def name(self) -> str:
        """The target's name without the folders before it."""
        return Path(self.target).name

    @property
    def ready(self) -> bool:
        """Whether everything is loaded."""
        return self._settled.is_set() and self.error is None

    @property
    def seconds(self) -> float:
        """Since loading began."""
        return time.perf_counter() - self._begin if self._begin else 0.0

    def titles(self) -> list[tuple[str, str]]:
        """Returns (words for the visitor, name) of each drafter."""
        return [(_title(name), name) for name in self.drafters]

    def start(self) -> None:
        """Begins to load, in a thread that ends with the process."""
        self._begin = time.perf_counter()
        threading.Thread(target=self._load, name="load models", daemon=True).start()

    def wait(self, seconds: float | None = None) -> bool:
        """Returns whether everything is loaded, after waiting so long at most; None waits until it is settled.

        Raises:
            ValueError: loading failed, and why.
        """
        settled = self._settled.wait(seconds)
        if self.error is not None:
            raise ValueError(self.error)
        return settled

    def drafter(self, name: str) -> Drafter:
        """Returns a loaded drafter.

        Raises:
            ValueError: one that the page does not offer.
        """
        if name not in self._loaded:
            raise ValueError(f"drafter {name!r}: choose one of {', '.join(self.drafters)}")
        return self._loaded[name]

    def costs(self, drafter: str, requests: int) -> CostTable:
        """Returns the seconds of steps, a copy that a run may correct; measures what is not known for so many requests.

        Args:
            drafter: its name.
            requests: B.
        """
        largest = powers_of_two(requests)[-1]
        if largest < requests:
            largest *= 2
        table = self._tables.get(drafter)
        if table is None or largest not in next(iter(table.seconds.values()), {}):
            config = DCutConfig(cost_table=self.cost_table if table is None else table)
            sizes = powers_of_two(largest)
            table = warmup(self.model, self.drafter(drafter), sizes, config, _MEASURED_LENGTH)
            self._tables[drafter] = table
        return copy.deepcopy(table)

    def known_costs(self, drafter: str) -> CostTable | None:
        """Returns a copy of what is measured already; None when nothing is."""
        return copy.deepcopy(self._tables.get(drafter))

    def _load(self) -> None:
        try:
            self.stage = "loading the model"
            device = "cuda" if torch.cuda.is_available() else "cpu"
            dtype = self.dtype or ("float32" if device == "cpu" else "auto")
            self.tokenizer = AutoTokenizer.from_pretrained(self.target)
            self.model = AutoModelForCausalLM.from_pretrained(self.target, dtype=dtype).eval().to(device)
            self.stage = "loading the drafters"
            for name in self.drafters:
                drafter = make_drafter(name, self.model)
                drafter.check(self.model)
                self._loaded[name] = drafter
            self.stage = "measuring what a step costs here"
            self.costs(self.drafters[0], self.first_batch)
            self.stage = "ready"
        except (OSError, ValueError, TypeError, MemoryError) as error:
            self.error = f"{self.stage} failed: {error} (target {self.target}, drafters {', '.join(self.drafters)})"
        finally:
            self._settled.set()


def _title(name: str) -> str:
    """Returns a drafter in words for the visitor."""
    source = source_of(name)
    if source is None:
        return _LOOKUP
    words = "Untrained DFlash (always wrong)" if source == "random" else f"DFlash ({Path(source).name})"
    return words if source == name else f"{words} and prompt lookup"
