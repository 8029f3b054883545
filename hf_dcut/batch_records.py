"""What a batch job is given and what it gives back."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from hf_dcut.requests import Request, Totals

# Between an input's name and the number of a further sequence of it, as in Transformers.
CHILD = "__child#"


@dataclass(frozen=True)
class BatchRequest:
    """One input of a batch job.

    Attributes:
        input_ids: the prompt, token ids without padding.
        request_id: key of its result; "req_0", "req_1", .. by its place among the inputs when None.
        generation_config: its own options, as if handed to `generate` alone; the job's when None.
        seed: of its sampling; from the job's seed when None.
        priority: who waits with a higher one is admitted first.
        logits_processor, stopping_criteria: its own, after those of the job.
        media: what else than token ids and mask the model's processor returned for this prompt alone: pixel_values,
            image_grid_thw, mm_token_type_ids and so on.
    """

    input_ids: Sequence[int]
    request_id: str | None = None
    generation_config: GenerationConfig | None = None
    seed: int | None = None
    priority: int = 0
    logits_processor: LogitsProcessorList | None = None
    stopping_criteria: StoppingCriteriaList | None = None
    media: Mapping[str, Tensor] | None = None


@dataclass
class BatchResult(GenerationOutput):
    """What became of one request: Transformers' `GenerationOutput`, and how it went.

    Attributes:
        finish_reason: "eos", "length", "stop" (a stop string or criterion), "cancelled" or "error".
        totals: its decoding steps, drafts verified, and drafts committed.
        seconds: from its first slot to its end.
    """

    finish_reason: str | None = None
    totals: Totals = field(default_factory=Totals)
    seconds: float = 0.0


def name_of(given: object, number: int) -> str:
    """Returns the key of an input's result: its own id, else Transformers' name for its number."""
    name = given.request_id if isinstance(given, BatchRequest) else None
    return name if isinstance(name, str) and name else f"req_{number}"


def failed(given: object, number: int, error: Exception) -> BatchResult:
    """Returns the result of an input that no request could be made of."""
    prompt = given.input_ids if isinstance(given, BatchRequest) else given
    known = isinstance(prompt, Sequence) and all(type(i) is int for i in prompt)
    return BatchResult(
        request_id=name_of(given, number),
        prompt_ids=list(prompt) if known else [],  # type: ignore[call-overload]
        error=describe(error),
        status=RequestStatus.FAILED,
        finish_reason="error",
    )


def result_of(request: Request) -> BatchResult:
    """Returns what became of a request that has ended."""
    now = time.perf_counter()
    began = now if request.admitted is None else request.admitted
    return BatchResult(
        request_id=request.name,
        prompt_ids=request.prompt,
        generated_tokens=request.tokens,
        logprobs=request.logprobs,
        error=None if request.error is None else describe(request.error),
        status=RequestStatus.FINISHED if request.error is None else RequestStatus.FAILED,
        created_time=request.created,
        lifespan=(began, now),
        finish_reason=request.finish_reason,
        totals=request.totals,
        seconds=now - began,
    )


def describe(error: Exception) -> str:
    """Returns an error's type and message."""
    return f"{type(error).__name__}: {error}"
