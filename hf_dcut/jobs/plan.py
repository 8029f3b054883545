"""`Plan`: what a job is to do, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_dcut.config import DCutConfig
from hf_dcut.drafters.checkpoint import parse_dtype
from hf_dcut.drafters.names import source_of
from hf_dcut.jobs import options
from hf_dcut.jobs.output import STDOUT
from hf_dcut.jobs.source import STDIN

NO_DRAFTER = "none"
_COUNTS = ("max_batch_size", "max_prompt_tokens", "max_new_tokens")


@dataclass(frozen=True)
class Plan:
    """One job.

    Attributes:
        input: file of JSON lines, or "-" for standard input.
        output: file of the results, or "-" for standard output.
        target: folder or Hub id.
        drafter: folder or Hub id, "lookup" (drafts from the text itself), "suffix" (from all answers so far), several
            joined by "+", or "none".
        target_revision, drafter_revision: branch, tag or commit on the Hub; None takes the main branch.
        dtype: of the target, such as "bfloat16"; "auto" as saved.
        budget: as in `DCutConfig`.
        max_batch_size: requests at once, at most.
        max_prompt_tokens: longest prompt that is answered.
        max_new_tokens: tokens of an answer, and the most that a line may ask for.
        options: generation options for all lines, from `options.ALLOWED`; a line's own come first.
        seed: line n draws with seed + n, unless it has its own.
        thinking: whether chat templates that know about it let the model think.
        token_ids: whether results hold the ids of their tokens.
        rejects: file for lines that cannot be answered; None is beside the output.
        strict: whether such a line stops the job before it begins.
        retry_errors: whether results of an earlier run that are errors are made again.
        trust_remote_code: whether code of the target's repository may run.
    """

    input: str
    output: str
    target: str
    drafter: str
    target_revision: str | None = None
    drafter_revision: str | None = None
    dtype: str = "auto"
    budget: float | str = "auto"
    max_batch_size: int = 32
    max_prompt_tokens: int = 8192
    max_new_tokens: int = 512
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    thinking: bool = False
    token_ids: bool = False
    rejects: Path | None = None
    strict: bool = False
    retry_errors: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: give a positive integer")
        if self.drafter != NO_DRAFTER and source_of(self.drafter) == NO_DRAFTER:
            alone = self.drafter.removeprefix(f"{NO_DRAFTER}+")
            raise ValueError(f"drafter {self.drafter!r}: nothing stands beside no drafter. Give {alone} alone")
        options.check({**self.options, "seed": self.seed})
        DCutConfig(budget=self.budget)
        if self.dtype != "auto":
            parse_dtype(self.dtype)
        paths = {"input": self.input, "output": self.output, "rejects": self.rejects_path}
        files = {name: Path(path).resolve() for name, path in paths.items() if path not in (None, STDIN)}
        for name, path in files.items():
            twin = next((other for other in files if other != name and files[other] == path), None)
            if twin is not None:
                raise ValueError(f"{name} and {twin} are the same file, {path}: give each its own")
        if self.retry_errors and self.output == STDOUT:
            raise ValueError("retry_errors needs the results of an earlier run: give output a file")

    @property
    def rejects_path(self) -> Path | None:
        """Where rejected lines go; None, if results go to standard output and no file was given."""
        if self.rejects is not None:
            return self.rejects
        return None if self.output == STDOUT else Path(f"{self.output}.rejects")

    @property
    def dcut(self) -> DCutConfig:
        """How drafts are cut."""
        return DCutConfig(budget="none" if self.drafter == NO_DRAFTER else self.budget)

    @property
    def drafter_source(self) -> str | None:
        """The drafter's folder or Hub repository; None if it has none."""
        return None if self.drafter == NO_DRAFTER else source_of(self.drafter)

    def fingerprint(self) -> dict[str, Any]:
        """Returns what tells this job's results from those of another, JSON-able; input and weights are not in it."""
        names = ("target", "drafter", "dtype", "budget", "max_new_tokens", "options", "seed", "thinking", "token_ids")
        return {name: getattr(self, name) for name in names}
