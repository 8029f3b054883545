"""`Target`: a stock Transformers model that runs packed rows, and shows the outputs of some layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_dcut.attention import Heads
from hf_dcut.cache import LayerShape, SlotCache
from hf_dcut.media import read_prompts
from hf_dcut.ranks import Ranks
from hf_dcut.recurrence import adopt, delta_layers
from hf_dcut.states import StateShape
from hf_dcut.trial import check_model, heads_of, packed_logits, shapes_of
from hf_dcut.types import Packed

# Outputs of tapped layers of the forward that runs in this thread.
_collected: ContextVar[dict[int, Tensor] | None] = ContextVar("hf_dcut_taps", default=None)


class Target:
    """A model and the layers whose outputs the drafter wants. Use as a context: hooks are removed on leaving.

    Args:
        model: any causal language model of Transformers with full or sliding attention and Gated DeltaNet layers.
        taps: decoder layers (0-based) to collect the output of.

    Attributes:
        ranks: the processes that hold the model.

    Raises:
        ValueError: the model's layers, RoPE or attention do not fit packed verification, or it lacks the taps.
    """

    def __init__(self, model: PreTrainedModel, taps: Sequence[int] = ()):
        check_model(model)
        adopt(delta_layers(model) if any(isinstance(shape, StateShape) for shape in shapes_of(model)) else [])
        self.model, self.taps, self.ranks = model, tuple(taps), Ranks.of(model)
        self._layers = tapped_layers(model, taps) if taps else nn.ModuleList()
        self._open = ExitStack()

    @property
    def shapes(self) -> tuple[LayerShape | StateShape, ...]:
        """What a slot holds of each layer."""
        return shapes_of(self.model)

    @property
    def heads(self) -> frozenset[Heads]:
        """How its layers attend."""
        return heads_of(self.model)

    @property
    def device(self) -> torch.device:
        """Where the model's inputs go."""
        return self.model.get_input_embeddings().weight.device

    @property
    def vocabulary(self) -> int:
        """V, entries of the logits."""
        return int(self.model.config.get_text_config(decoder=True).vocab_size)

    @property
    def dtype(self) -> torch.dtype:
        """Of the model's K/V."""
        return self.model.dtype

    def __enter__(self) -> Target:
        for index in set(self.taps):
            handle = self._layers[index].register_forward_hook(_collector(index))
            self._open.callback(handle.remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def forward(self, packed: Packed, cache: SlotCache) -> tuple[Tensor, Tensor | None]:
        """Returns logits [L, V] of `packed.logit_rows` and taps [T, F] of all rows (None without taps)."""
        place = packed.place
        with _collecting() as collected:
            if place is None:
                logits = packed_logits(self.model, packed, cache)
            else:
                logits = read_prompts(self.model, packed, place, cache)
        if not self.taps:
            return logits, None
        rows = 0 if place is None else (place.row, place.column)
        return logits, torch.cat([collected[index][rows] for index in self.taps], dim=-1)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList | None:
    """Returns the decoder layers of a model; None where it does not show them."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    layers = getattr(decoder, "layers", None)
    return layers if isinstance(layers, nn.ModuleList) else None


def tapped_layers(model: PreTrainedModel, taps: Sequence[int]) -> nn.ModuleList:
    """Returns the decoder layers of the model after checking that the taps are among them."""
    layers = decoder_layers(model)
    if layers is None:
        raise ValueError(
            f"{type(model).__name__} shows no list of decoder layers under get_decoder().layers, so their outputs "
            "cannot be read: DFlash drafters do not work with it, prompt lookup does"
        )
    outside = [tap for tap in taps if not 0 <= tap < len(layers)]
    if outside or not taps:
        raise ValueError(f"taps={list(taps)}: give one or more layers of the target, 0 to {len(layers) - 1}")
    return layers


@contextmanager
def _collecting() -> Iterator[dict[int, Tensor]]:
    """Gives the hooks of this thread a place for the outputs of one forward."""
    collected: dict[int, Tensor] = {}
    token = _collected.set(collected)
    try:
        yield collected
    finally:
        _collected.reset(token)


def _collector(index: int) -> Any:
    """Returns a hook that keeps a layer's output while a packed forward runs in this thread, and else does nothing."""

    def keep(module: nn.Module, inputs: object, output: Any) -> None:
        collected = _collected.get()
        if collected is None:
            return
        collected[index] = states = output[0] if isinstance(output, tuple) else output
        if states.dim() != 3:
            raise ValueError(
                f"{type(module).__name__} puts out {tuple(states.shape)} instead of [rows, T, hidden]: no drafter that "
                "reads its layers can draft for this model. Use prompt_lookup_num_tokens"
            )

    return keep
