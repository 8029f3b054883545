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

from hf_dcut.adapters import adapters_of, check_adapters
from hf_dcut.attention import UnsupportedAttention, packed_attention
from hf_dcut.cache import LayerShape, SlotCache, cells_of, shape_of
from hf_dcut.media import read_prompts
from hf_dcut.ranks import Ranks
from hf_dcut.recurrence import adopt, delta_layers, packed_recurrence, recurrent_names
from hf_dcut.states import StateShape
from hf_dcut.types import Packed, Verdict

_LAYER_TYPES = {"full_attention", "sliding_attention", "linear_attention"}
# Relative difference allowed between two ways to the same logits. A wrong mask or position gives 0.1 and more.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2}
# The delta rule is computed in float32, whatever the model's dtype.
_RECURRENT_TOLERANCE = 1e-4

# Slot shapes of the models that passed the check, and their adapters then; keyed by the model, so that nothing outlives
# it. Weights may change, structure does not.
_checked: WeakKeyDictionary[nn.Module, tuple[tuple[LayerShape | StateShape, ...], list[str]]] = WeakKeyDictionary()
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
        adopt(delta_layers(model) if any(isinstance(shape, StateShape) for shape in _checked[model][0]) else [])
        self.model, self.taps, self.ranks = model, tuple(taps), Ranks.of(model)
        self._layers = tapped_layers(model, taps) if taps else nn.ModuleList()
        self._open = ExitStack()

    @property
    def shapes(self) -> tuple[LayerShape | StateShape, ...]:
        """What a slot holds of each layer."""
        return _checked[self.model][0]

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
                logits = _packed_logits(self.model, packed, cache)
            else:
                logits = read_prompts(self.model, packed, place, cache)
        if not self.taps:
            return logits, None
        rows = 0 if place is None else (place.row, place.column)
        return logits, torch.cat([collected[index][rows] for index in self.taps], dim=-1)


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
    if any(weight.is_meta for weight in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} has weights that are offloaded to memory or disk, which every step would fetch "
            "again: load it whole on one device, with device_map={'': 0} or device_map={'': 'cpu'}"
        )
    kind = model.device.type
    if torch.is_autocast_enabled(kind):
        _check_dtypes(model, {model.dtype, torch.get_autocast_dtype(kind)})
    check_adapters(model)
    _check_dropout(model)
    adapters = adapters_of(model)
    if model in _checked and _checked[model][1] == adapters:
        return
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    advice = "Generate without dcut for this model"
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder model: dcut needs a decoder-only model. {advice}")
    kinds, deltas = getattr(config, "layer_types", None) or [], delta_layers(model)
    if len(deltas) < kinds.count("linear_attention") or (getattr(model, "_is_stateful", False) and not deltas):
        raise ValueError(
            f"{name} keeps a recurrent state{recurrent_names(model)}, which rejected drafts cannot be taken out of: "
            f"dcut knows how for the Gated DeltaNet layers of Qwen3.5 and Qwen3-Next only. {advice}"
        )
    foreign = sorted(set(kinds) - _LAYER_TYPES)
    if foreign:
        raise ValueError(
            f"{name} has layers of type {', '.join(foreign)}: dcut handles full and sliding attention. {advice}"
        )
    if "dynamic" in rope_types(model):
        raise ValueError(f"{name} uses dynamic RoPE, which scales by the longest row of a batch. {advice}")
    devices = {str(device) for device in getattr(model, "hf_device_map", {}).values()}
    if len(devices) > 1:
        raise ValueError(
            f"{name} is spread over devices {sorted(devices)} by device_map, which keeps one of them busy at a time: "
            "load it on one with device_map={'': 0}, or split its layers with "
            "distributed_config=DistributedConfig(tp_size=N)"
        )
    Ranks.of(model)
    adopt(deltas)
    _checked[model] = _compare_with_stock(model), adapters


def _check_dropout(model: PreTrainedModel) -> None:
    """Raises ValueError when the model drops activations at random: no forward of it equals another then."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.training and module.p:
            raise ValueError(
                f"{type(model).__name__} is in training mode and drops activations in {name} (p={module.p}): call "
                f"model.eval() before generating"
            )


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
    with packed_attention(packed, cache.windows), packed_recurrence(packed):
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


def _compare_with_stock(model: PreTrainedModel) -> tuple[LayerShape | StateShape, ...]:
    """Returns the slot shapes of the model's layers after checking a packed forward against the stock one.

    Two sequences of 9 and 6 tokens: stock in one go each; packed in two ragged steps, 5 + 2 tokens and then 4 + 4.
    """
    device, vocabulary = model.get_input_embeddings().weight.device, model.get_input_embeddings().weight.shape[0]
    rows = [(torch.arange(n, device=device) * 7 + 3 + n) % vocabulary for n in (9, 6)]
    caches = [DynamicCache(config=model.config) for _ in rows]
    with torch.no_grad():
        stock = torch.cat(
            [model(input_ids=r[None], cache=c, use_cache=True).logits[0] for r, c in zip(rows, caches, strict=True)]
        )
        dtypes = {tensor.dtype for layer in caches[0].layers for tensor in cells_of(layer)}
        _check_dtypes(model, dtypes)
        shapes = tuple(map(shape_of, caches[0].layers))
        cache = SlotCache(shapes, slots=2, length=9, dtype=dtypes.pop(), device=device)
        try:
            first, second = (
                _accepted_logits(model, _ragged(rows, start, end), cache)
                for start, end in (([0, 0], [5, 2]), ([5, 2], [9, 6]))
            )
        except (UnsupportedAttention, torch.OutOfMemoryError):
            raise
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            # What a model's code does with a mask, a cache or keywords that it does not expect.
            raise ValueError(
                f"{type(model).__name__} cannot run packed rows ({type(error).__name__}: {error}): its code does not "
                f"hand its keywords to attention and cache as dcut needs. Generate without dcut for this model"
            ) from error
    packed = torch.cat([first[:5], second[:4], first[5:], second[4:]])
    difference = relative_difference(packed, stock)
    allowed = max(TOLERANCE[stock.dtype], _RECURRENT_TOLERANCE if cache.recurrent else 0)
    if not difference <= allowed:
        raise ValueError(
            f"{type(model).__name__} gives other logits for packed rows than for plain ones (relative difference "
            f"{difference:.1e}, allowed {allowed:.0e}): {_cause(model)}. Generate without dcut for "
            f"this model"
        )
    return shapes


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Returns how far two tensors lie apart, as a share of the expected one. To be weighed against `TOLERANCE`."""
    return ((found - expected).norm() / expected.norm()).item()


def _cause(model: PreTrainedModel) -> str:
    """Returns what makes packed rows of a model differ from plain ones."""
    if getattr(model, "is_quantized", False):
        return "its quantised layers round activations too, so that the last bits of a row are not its own"
    return "its attention does not go through Transformers' attention interface as dcut needs"


def _accepted_logits(model: PreTrainedModel, packed: Packed, cache: SlotCache) -> Tensor:
    """Returns logits [L, V] of a packed row, all rows of which become the slots' content."""
    logits = _packed_logits(model, packed, cache)
    counts = packed.start.diff().long()
    row = packed.start[:-1, None] + torch.arange(packed.width, device=counts.device)
    path = torch.where(row < packed.start[1:, None], row.long(), -1)
    cache.commit(Verdict(counts - 1, torch.zeros_like(counts), path), packed)
    return logits


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
