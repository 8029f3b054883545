"""`Target`: a stock Transformers model that runs packed rows.

What a model can do is found out, not looked up by name: its layer types and RoPE must be ones whose maths fit a packed
row, and once per model two short ragged sequences are run packed and through the stock forward, which must agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from hf_dcut.attention import UnsupportedAttention, packed_attention
from hf_dcut.cache import LayerShape, SlotCache
from hf_dcut.types import Packed

_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Relative difference allowed between the packed and the stock forward. A wrong mask or position gives 0.1 and more.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2}

# K/V shapes of the models that passed the check; keyed by the model, so that nothing outlives it.
_checked: WeakKeyDictionary[nn.Module, tuple[LayerShape, ...]] = WeakKeyDictionary()
# Outputs of tapped layers of the forward that runs in this thread.
_collected: ContextVar[dict[int, Tensor] | None] = ContextVar("hf_dcut_taps", default=None)


class Target:
    """A model and the layers whose outputs the drafter wants. Use as a context: hooks are removed on leaving.

    Args:
        model: any causal language model of Transformers with full or sliding attention layers.
        taps: decoder layers (0-based) to collect the output of.

    Raises:
        ValueError: the model's layers, RoPE or attention do not fit packed verification, or it lacks the taps.
    """

    def __init__(self, model: PreTrainedModel, taps: Sequence[int] = ()):
        check_model(model)
        self.model, self.taps = model, tuple(taps)
        self._layers = tapped_layers(model, taps) if taps else nn.ModuleList()
        self._open = ExitStack()

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        """K/V shape of each attention layer."""
        return _checked[self.model]

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
        with _collecting() as collected:
            logits = _packed_logits(self.model, packed, cache)
        if not self.taps:
            return logits, None
        return logits, torch.cat([collected[index][0] for index in self.taps], dim=-1)


def tapped_layers(model: PreTrainedModel, taps: Sequence[int]) -> nn.ModuleList:
    """Returns the decoder layers of the model after checking that the taps are among them."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(
            f"{type(model).__name__} shows no list of decoder layers under get_decoder().layers, so their outputs "
            "cannot be read: DFlash drafters do not work with it, prompt lookup does"
        )
    outside = [tap for tap in taps if not 0 <= tap < len(layers)]
    if outside or not taps:
        raise ValueError(f"taps={list(taps)}: give one or more layers of the target, 0 to {len(layers) - 1}")
    return layers


def check_model(model: PreTrainedModel) -> None:
    """Raises ValueError, naming what it found, unless packed rows of this model equal its stock forward."""
    kind = model.device.type
    if torch.is_autocast_enabled(kind):
        _check_dtypes(model, {model.dtype, torch.get_autocast_dtype(kind)})
    if model in _checked:
        return
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    advice = "Generate without dcut for this model"
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder model: dcut needs a decoder-only model. {advice}")
    if getattr(model, "_is_stateful", False):
        raise ValueError(f"{name} keeps a recurrent state, which rejected drafts cannot be taken out of. {advice}")
    foreign = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    if foreign:
        raise ValueError(
            f"{name} has layers of type {', '.join(foreign)}: dcut handles full and sliding attention. {advice}"
        )
    if "dynamic" in rope_types(model):
        raise ValueError(f"{name} uses dynamic RoPE, which scales by the longest row of a batch. {advice}")
    devices = {str(device) for device in getattr(model, "hf_device_map", {}).values()}
    if len(devices) > 1:
        raise ValueError(
            f"{name} is spread over devices {sorted(devices)}: dcut needs it on one. Load it with device_map=None"
        )
    _checked[model] = _compare_with_stock(model)


def _check_dtypes(model: PreTrainedModel, found: set[torch.dtype]) -> None:
    """Raises ValueError when a model's K/V are of several dtypes: RoPE and projections differ under autocast."""
    if len(found) > 1:
        raise ValueError(
            f"{type(model).__name__} makes keys and values of several dtypes ({', '.join(sorted(map(str, found)))}), "
            f"as under torch.autocast: generate outside of it, or load the model in the dtype that it casts to"
        )


def check_length(model: PreTrainedModel, prompt: int, longest: int) -> None:
    """Raises ValueError when a prompt of so many tokens, or a request of `longest`, is beyond the model's positions."""
    config = model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and prompt > limit:
        raise ValueError(
            f"a prompt has {prompt} tokens but the model has {limit} positions: shorten it to at most {limit}"
        )
    original = min(
        (
            int(p["original_max_position_embeddings"])
            for p in _ropes(model)
            if p.get("rope_type") == "longrope" and "original_max_position_embeddings" in p
        ),
        default=None,
    )
    if original is None and "longrope" in rope_types(model):
        original = getattr(config, "original_max_position_embeddings", None)
    if original is not None and longest > original:
        raise ValueError(
            f"requests of up to {longest} tokens go past {original} positions, where this model's longrope rescales "
            f"the whole batch: lower max_new_tokens or shorten the prompts to stay within {original}"
        )


def rope_types(model: PreTrainedModel) -> set[str]:
    """Returns the kinds of RoPE scaling that the model's layers use."""
    return {str(parameters.get("rope_type", "default")) for parameters in _ropes(model)}


def _ropes(model: PreTrainedModel) -> list[dict[str, Any]]:
    """Returns the RoPE parameters of the model: one set, or one for each layer type."""
    parameters = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [dict(parameters)]


def _packed_logits(model: PreTrainedModel, packed: Packed, cache: SlotCache) -> Tensor:
    """Returns logits [L, V] of a packed row, whose K/V go into the cache."""
    cache.packed = packed
    with packed_attention(packed, cache.windows):
        output = model(
            input_ids=packed.token[None],
            position_ids=packed.position.unsqueeze(-2),
            # Any 4-D mask keeps Transformers from building one of its own; ours are made in attention.py.
            attention_mask=torch.zeros(1, 1, 1, 1, device=packed.token.device),
            cache=cache,
            use_cache=True,
            return_dict=True,
            logits_to_keep=packed.logit_rows,
            packed=packed,
        )
    return output.logits[0]


def _compare_with_stock(model: PreTrainedModel) -> tuple[LayerShape, ...]:
    """Returns the K/V shapes of the model's layers after checking a packed forward against the stock one.

    Two sequences of 9 and 6 tokens: stock in one go each; packed in two ragged steps, 5 + 2 tokens and then 4 + 4.
    """
    device, vocabulary = model.get_input_embeddings().weight.device, model.get_input_embeddings().weight.shape[0]
    rows = [(torch.arange(n, device=device) * 7 + 3 + n) % vocabulary for n in (9, 6)]
    caches = [DynamicCache(config=model.config) for _ in rows]
    with torch.no_grad():
        stock = torch.cat(
            [model(input_ids=r[None], cache=c, use_cache=True).logits[0] for r, c in zip(rows, caches, strict=True)]
        )
        filled = [layer for layer in caches[0].layers if layer.keys is not None]
        dtypes = {states.dtype for layer in filled for states in (layer.keys, layer.values)}
        _check_dtypes(model, dtypes)
        shapes = tuple(map(_shape_of, caches[0].layers))
        cache = SlotCache(shapes, slots=2, length=9, dtype=dtypes.pop(), device=device)
        try:
            first = _packed_logits(model, _ragged(rows, [0, 0], [5, 2]), cache)
            second = _packed_logits(model, _ragged(rows, [5, 2], [9, 6]), cache)
        except (UnsupportedAttention, torch.OutOfMemoryError):
            raise
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            # What a model's code does with a mask, a cache or keywords that it does not expect.
            raise ValueError(
                f"{type(model).__name__} cannot run packed rows ({type(error).__name__}: {error}): its code does not "
                f"hand its keywords to attention and cache as dcut needs. Generate without dcut for this model"
            ) from error
    packed = torch.cat([first[:5], second[:4], first[5:], second[4:]])
    difference = ((packed - stock).norm() / stock.norm()).item()
    if not difference <= _TOLERANCE[stock.dtype]:
        raise ValueError(
            f"{type(model).__name__} gives other logits for packed rows than for plain ones (relative difference "
            f"{difference:.1e}, allowed {_TOLERANCE[stock.dtype]:.0e}): its attention does not go through "
            f"Transformers' attention interface as dcut needs. Generate without dcut for this model"
        )
    return shapes


def _shape_of(layer: Any) -> LayerShape:
    """Returns the shape of a layer of Transformers' dynamic cache after a forward; some never hold anything."""
    if layer.keys is None:
        return LayerShape(0, 0, 0, 0)
    key, value = layer.keys.shape, layer.values.shape
    return LayerShape(key[1], key[3], value[1], value[3], layer.sliding_window if layer.is_sliding else None)


def _ragged(rows: Sequence[Tensor], start: Sequence[int], end: Sequence[int]) -> Packed:
    """Returns a packed row that takes tokens start .. end-1 of each sequence, as decoding requests in slots 0, 1, .."""
    device, sizes = rows[0].device, [b - a for a, b in zip(start, end, strict=True)]
    counts = torch.tensor(sizes, device=device)
    cell = torch.cat([torch.arange(a, b, device=device) for a, b in zip(start, end, strict=True)])
    return Packed(
        token=torch.cat([r[a:b] for r, a, b in zip(rows, start, end, strict=True)]),
        slot=torch.repeat_interleave(torch.arange(len(rows), device=device), counts),
        cell=cell,
        position=cell,
        node=torch.cat([torch.arange(-1, n - 1, device=device) for n in sizes]),
        start=nn.functional.pad(counts.cumsum(0), (1, 0)).int(),
        used=torch.tensor(end, device=device).int(),
        logit_rows=torch.arange(sum(sizes), device=device),
        decoding=len(rows),
        slots=len(rows),
        reach=max(end),
        width=max(sizes),
    )


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
        if states.dim() != 3 or len(states) > 1:
            raise ValueError(
                f"{type(module).__name__} puts out {tuple(states.shape)} instead of [1, T, hidden]: no drafter that "
                "reads its layers can draft for this model. Use prompt_lookup_num_tokens"
            )

    return keep
