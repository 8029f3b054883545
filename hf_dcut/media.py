"""`Media`: what a prompt holds besides text, such as images, and how it is read.

A packed row is text. Prompts with images are read as plain `generate` reads them: the left-padded batch of the call
in one forward of the model's own, with its own masks (images may see themselves in both directions) and its own
positions (an image's patches lie in a plane). What it stores goes into the requests' slots, and from there on they
are decoded like all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from hf_dcut.cache import SlotCache, SlotLayer
from hf_dcut.types import Packed, Record

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Which tokens are images and the like, and where an image's patches lie: read with the prompt, as the pixels are.
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
MEDIA_INPUTS = frozenset(
    {*MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL, *TOKEN_TYPES, "image_grid_thw", "video_grid_thw", "second_per_grid_ts"}
)


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """The prompts of one call as the model's own forward takes them.

    Attributes:
        inputs: its keywords, prepared by Transformers: left-padded input_ids int64 [B, P], positions, pixels and so on.
        position: int64 [B, P], or [3, B, P] where time, height and width of an image are told apart: what RoPE sees.
    """

    inputs: dict[str, Any]
    position: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Media:
    """The media of one request.

    Attributes:
        prompts: of its whole call.
        row: which of them is its own.
        pads: before it.
        rope: what is added to a cell behind the prompt to get its position: an image takes fewer positions than cells.
    """

    prompts: Prompts
    row: int
    pads: int
    rope: int


@dataclass(frozen=True, slots=True)
class Place(Record):
    """Where the tokens of a packed row lie in the prompts of a call.

    Attributes:
        prompts: of the call.
        row, column: int64 [T].
    """

    prompts: Prompts
    row: Tensor
    column: Tensor


def takes_media(model: PreTrainedModel) -> bool:
    """Returns whether the model reads anything besides text."""
    return any(kind in model.input_modalities for kind in ("image", "video", "audio"))


def has_media(inputs: dict[str, Any]) -> bool:
    """Returns whether the keywords of a model's first forward bring anything besides text."""
    return any(_holds(name, inputs[name]) for name in MEDIA_INPUTS & inputs.keys())


def media_of(input_ids: Tensor, pads: Sequence[int], inputs: dict[str, Any]) -> list[Media]:
    """Returns the media of each row.

    Args:
        input_ids: int64 [B, P].
        pads: before each prompt.
        inputs: the other keywords of the forward, as Transformers prepared them.

    Raises:
        ValueError: a prompt ends inside an image, where time, height and width go on from different positions.
    """
    rows, width = input_ids.shape
    position = inputs["position_ids"]
    # Before time, height and width goes the text, by which models mask.
    position = position[1:] if position.ndim == 3 else position
    position = position.expand(*position.shape[:-2], rows, width)
    last = position[..., -1].view(-1, rows)
    if (last != last[0]).any():
        raise ValueError(
            "input_ids end inside an image or a video, behind which dcut cannot go on: end each prompt with text, as "
            "chat templates do"
        )
    kept = {name: value for name, value in inputs.items() if name != "cache"}
    prompts = Prompts({**kept, "input_ids": input_ids}, position)
    ends = last[0].tolist()
    return [Media(prompts, row, pad, ends[row] + 1 - (width - pad)) for row, pad in enumerate(pads)]


def placed(packed: Packed, media: Sequence[Media]) -> Packed:
    """Returns a row of whole prompts with their positions, and their place in the batch of the call.

    Args:
        packed: the row.
        media: of each of its requests, all of one call.
    """
    prompts, device, counts = media[0].prompts, packed.cell.device, packed.start.diff()
    row = torch.repeat_interleave(torch.tensor([m.row for m in media], device=device), counts)
    column = packed.cell + torch.repeat_interleave(torch.tensor([m.pads for m in media], device=device), counts)
    position = prompts.position.to(device)[..., row, column]
    return replace(packed, position=position, place=Place(prompts, row, column))


def read_prompts(model: PreTrainedModel, packed: Packed, place: Place, cache: SlotCache) -> Tensor:
    """Returns logits [L, V] of a packed row's `logit_rows` by the model's own forward; K/V go into the slots.

    Args:
        model: the target.
        packed: a row of whole prompts.
        place: where its tokens lie in the batch of their call, all of which is read.
        cache: the target's K/V.
    """
    # Without a config every layer keeps all K/V: the window of a slot is its reader's affair.
    stored = DynamicCache()
    inputs = model.prepare_inputs_for_generation(**place.prompts.inputs, cache=stored, is_first_iteration=True)
    output = model(**inputs, return_dict=True)
    for slots, read in zip(cache.layers, stored.layers, strict=True):
        assert isinstance(slots, SlotLayer), "prompts with media are refused where layers are recurrent"
        keys, values = (states[place.row, :, place.column] for states in (read.keys, read.values))
        slots.store(packed.slot, packed.cell, keys, values)
    return output.logits[place.row[packed.logit_rows], -1]


def _holds(name: str, value: Any) -> bool:
    """Returns whether a keyword of the forward brings media: processors also mark text as such."""
    if name in TOKEN_TYPES:
        return value is not None and bool(value.any())
    return any(v is not None for v in value.values()) if isinstance(value, dict) else value is not None
