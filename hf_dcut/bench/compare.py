"""Methods side by side: interleaved rounds on the same prompts, medians, ratios to plain `generate` of the same round.

Only ratios within a run mean anything: a shared machine's speed drifts by more than methods differ.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dcut.config import DCutConfig
from hf_dcut.drafters.base import Drafter
from hf_dcut.stats import Stats

GENERATE, PLAIN = "generate", "plain"
DEFAULT_METHODS = (GENERATE, PLAIN, "1.0", "0.25", "0.5", "0.75", "auto")


@dataclass
class Measured:
    """What the rounds of one method came to.

    Attributes:
        name: of the method.
        seconds, tokens: of each round, and the new tokens it made.
        ratios: tokens/s over those of plain `generate` in the same round.
        stats: of every call; empty for plain `generate`.
        sequences: new tokens of every prompt, end token included, from the last round.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    stats: list[Stats] = field(default_factory=list)
    sequences: list[list[int]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Median over rounds."""
        return statistics.median(t / s for t, s in zip(self.tokens, self.seconds, strict=True))

    @property
    def ratio(self) -> float:
        """Median speed over plain `generate`."""
        return statistics.median(self.ratios)

    def summed(self, name: str) -> float:
        """Returns a count of the stats, summed over calls."""
        return sum(getattr(stats, name) for stats in self.stats)

    def share(self, part: str, whole: str) -> float | None:
        """Returns the ratio of two summed counts; None where there is nothing to divide by."""
        total = self.summed(whole)
        return self.summed(part) / total if total else None


def options_of(method: str, drafter: Drafter | None, config: DCutConfig) -> dict[str, Any]:
    """Returns the keywords of `generate` that a method stands for.

    Args:
        method: "generate" (Transformers' own), "plain" (ours without drafts), "auto", or a budget in (0, 1].
        drafter: who proposes.
        config: what holds for all methods, such as the place of the cost table.

    Raises:
        ValueError: an unknown method.
    """
    if method == GENERATE:
        return {}
    if method == PLAIN:
        return {"dcut": "none", "return_dict_in_generate": True}
    try:
        budget = method if method == "auto" else float(method)
    except ValueError:
        raise ValueError(f"method {method!r}: give {', '.join(DEFAULT_METHODS)} or another budget in (0, 1]") from None
    values = {f: getattr(config, f) for f in ("ratios", "draft_tokens", "cost_table", "deterministic")}
    return {"dcut": DCutConfig(budget=budget, **values), "assistant_model": drafter, "return_dict_in_generate": True}


def compare(
    model: PreTrainedModel,
    batches: Sequence[dict[str, Tensor]],
    methods: Sequence[str],
    drafter: Drafter | None,
    config: DCutConfig,
    max_new_tokens: int,
    rounds: int,
    progress: Callable[[], object] = lambda: None,
) -> list[Measured]:
    """Returns one `Measured` a method, in order, plain `generate` first among what is timed in each round.

    Args:
        model: the target.
        batches: prompts, encoded.
        methods: names, as in `options_of`.
        drafter: who proposes.
        config: for all methods.
        max_new_tokens: of each prompt.
        rounds: how often every method runs; before them each warms up on a few tokens.
        progress: called after each run of a method.
    """
    order = [GENERATE, *(m for m in methods if m != GENERATE)]
    options = {method: options_of(method, drafter, config) for method in order}
    measured = {method: Measured(method) for method in order}
    for method in order:
        _run(model, batches[:1], options[method], min(4, max_new_tokens))
    for number in range(rounds):
        # Every round begins at another method, so that none always follows the same neighbour.
        turn = number % len(order)
        for method in order[turn:] + order[:turn]:
            seconds, sequences, stats = _run(model, batches, options[method], max_new_tokens)
            entry = measured[method]
            entry.seconds.append(seconds)
            entry.tokens.append(sum(map(len, sequences)))
            entry.stats.extend(stats)
            entry.sequences = sequences
            progress()
    base = measured[GENERATE]
    for entry in measured.values():
        speeds = zip(entry.tokens, entry.seconds, base.tokens, base.seconds, strict=True)
        entry.ratios = [(t / s) / (bt / bs) for t, s, bt, bs in speeds]
    return [measured[method] for method in order if method in methods or method == GENERATE]


def equal_rows(entry: Measured, base: Measured) -> int:
    """Returns how many prompts got exactly the same tokens from two methods."""
    return sum(a == b for a, b in zip(entry.sequences, base.sequences, strict=True))


def _run(
    model: PreTrainedModel, batches: Sequence[dict[str, Tensor]], options: dict[str, Any], max_new_tokens: int
) -> tuple[float, list[list[int]], list[Stats]]:
    """Returns seconds, new tokens of each prompt and stats of generating for all batches."""
    seconds, sequences, stats = 0.0, [], []
    for batch in batches:
        _wait(model)
        start = time.perf_counter()
        output = model.generate(**batch, max_new_tokens=max_new_tokens, do_sample=False, **options)
        _wait(model)
        seconds += time.perf_counter() - start
        if not isinstance(output, Tensor):
            stats.append(output.stats)
            output = output.sequences
        sequences += new_tokens(output[:, batch["input_ids"].shape[1] :], model)
    return seconds, sequences, stats


def new_tokens(rows: Tensor, model: PreTrainedModel) -> list[list[int]]:
    """Returns each row's tokens up to and with its first end token, without the padding behind it.

    Args:
        rows: int64 [B, n], generated tokens.
        model: whose generation config names the end tokens.
    """
    eos = model.generation_config.eos_token_id
    ends = set(eos if isinstance(eos, list) else [eos])
    cut = []
    for row in rows.tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        cut.append(row[:end])
    return cut


def _wait(model: PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
