"""Transformers' own ways to answer a list of prompts, for comparison.

generate         static batches of B, each until its last answer ends: it drains, and is not refilled
static-compile   the same with a static cache and a compiled forward, prompts padded to one width
assisted         assisted decoding with a small model, one request at a time
prompt-lookup    drafts copied from the prompt, one request at a time
generate-batch   continuous batching, at most B requests at once
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

GENERATE, COMPILED, ASSISTED, LOOKUP, CONTINUOUS = (
    "generate",
    "static-compile",
    "assisted",
    "prompt-lookup",
    "generate-batch",
)
PEERS = (GENERATE, COMPILED, ASSISTED, LOOKUP, CONTINUOUS)
# Upstream assists one request at a time only.
SINGLE = (ASSISTED, LOOKUP)
_LOOKUP_TOKENS = 10
_PAGE = 256


@dataclass(frozen=True)
class Options:
    """What a run depends on.

    Attributes:
        batch: B, requests at once.
        max_new_tokens: of each.
        temperature: 0 decodes greedily.
        width: tokens of the longest prompt of the cell.
        assistant: for assisted decoding.
    """

    batch: int
    max_new_tokens: int
    temperature: float
    width: int
    assistant: PreTrainedModel | None

    @property
    def keywords(self) -> dict[str, Any]:
        """Of `generate`: nothing but temperature shapes the distribution."""
        if not self.temperature:
            return {"max_new_tokens": self.max_new_tokens, "do_sample": False}
        values = {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}
        return {"max_new_tokens": self.max_new_tokens, **values}


def run(
    method: str, model: PreTrainedModel, prompts: Sequence[list[int]], options: Options
) -> tuple[float, list[list[int]], float | None]:
    """Returns seconds, the answers with whatever stands behind their ends, and seconds to the first token.

    Args:
        method: one of `PEERS`.
        model: the target.
        prompts: token ids of each.
        options: for all of them.

    Raises:
        ValueError: assisted decoding without an assistant.
        RuntimeError: upstream's continuous batching lost a request.
    """
    if method == CONTINUOUS:
        return _continuous(model, prompts, options)
    extra: dict[str, Any] = {}
    if method == ASSISTED:
        if options.assistant is None:
            raise ValueError("method 'assisted' needs a small model: give --assistant, or leave the method out")
        extra = {"assistant_model": options.assistant}
    elif method == LOOKUP:
        extra = {"prompt_lookup_num_tokens": _LOOKUP_TOKENS}
    elif method == COMPILED:
        extra = {"cache_implementation": "static", "compile_config": _compile_config(model.device)}
    return _batches(model, prompts, options, extra, options.width if method == COMPILED else 0)


def padded(prompts: Sequence[list[int]], device: torch.device, width: int = 0) -> dict[str, Tensor]:
    """Returns input_ids and attention_mask, int64 [B, width or longest], left-padded with zeros.

    Args:
        prompts: token ids of each.
        device: where to.
        width: least width.
    """
    width = max(width, *map(len, prompts))
    rows = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(rows, device=device), "attention_mask": torch.tensor(mask, device=device)}


def _batches(
    model: PreTrainedModel, prompts: Sequence[list[int]], options: Options, extra: dict[str, Any], width: int
) -> tuple[float, list[list[int]], float]:
    """Returns seconds, answers and seconds to the first token of `generate` on one static batch after the other."""
    answers: list[list[int]] = []
    clock = _FirstToken()
    begin = time.perf_counter()
    for start in range(0, len(prompts), options.batch):
        batch = padded(prompts[start : start + options.batch], model.device, width)
        streamer = clock if start == 0 else None
        rows = model.generate(**batch, **options.keywords, **extra, streamer=streamer)
        answers += rows[:, batch["input_ids"].shape[1] :].tolist()
    seconds = time.perf_counter() - begin
    return seconds, answers, clock.times[1] - begin


class _FirstToken(BaseStreamer):
    """Notes when the prompt and the first token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        if len(self.times) < 2:
            self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to print."""


def _continuous(
    model: PreTrainedModel, prompts: Sequence[list[int]], options: Options
) -> tuple[float, list[list[int]], float]:
    """Returns the same of `generate_batch`, until its last token: closing its manager afterwards does not count."""
    given = {"eos_token_id": model.generation_config.eos_token_id, "pad_token_id": model.generation_config.pad_token_id}
    limits: dict[str, int] = {"max_requests_per_batch": options.batch}
    if model.device.type != "cuda":
        # It sizes its cache by the memory of a GPU; without one it must be told.
        pages = -(-(options.width + options.max_new_tokens) // _PAGE) + 1
        limits |= {"num_blocks": pages * options.batch, "max_batch_tokens": max(2048, options.batch)}
    begin = time.perf_counter()
    outputs = model.generate_batch(
        list(prompts),
        generation_config=GenerationConfig(**options.keywords, **given),
        continuous_batching_config=ContinuousBatchingConfig(**limits),
        record_timestamps=True,
        progress_bar=False,
    )
    results = list(outputs.values())
    broken = [result.error for result in results if result.error]
    if broken or len(results) != len(prompts):
        raise RuntimeError(f"generate_batch answered {len(results)} of {len(prompts)} prompts; errors: {broken}")
    seconds = max(result.timestamps[-1] for result in results) - begin
    first = sorted(result.timestamps[0] - begin for result in results)[: options.batch]
    return seconds, [result.generated_tokens for result in results], first[len(first) // 2]


def _compile_config(device: torch.device) -> CompileConfig:
    """Returns upstream's own way to compile on a GPU, and elsewhere what makes it compile there too."""
    if device.type == "cuda":
        return CompileConfig()
    config = CompileConfig(mode="default")
    config._compile_all_devices = True
    return config
