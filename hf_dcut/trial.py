"""Whether a stock Transformers model can run packed rows: what it can do is found out, not looked up by name.

Its layer types and RoPE must be ones whose maths fit a packed row. Then, once per model, two short ragged sequences are
run packed and through the stock forward, which must agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from hf_dcut.adapters import adapters_of, check_adapters
from hf_dcut.attention import Heads, UnsupportedAttention, packed_attention
from hf_dcut.cache import LayerShape, SlotCache, cells_of, shape_of
from hf_dcut.lengths import rope_types
from hf_dcut.ranks import Ranks
from hf_dcut.recurrence import adopt, delta_layers, packed_recurrence, recurrent_names
from hf_dcut.states import StateShape
from hf_dcut.types import Packed, Verdict

_LAYER_TYPES = {"full_attention", "sliding_attention", "linear_attention"}
# Relative difference allowed between two ways to the same logits. A wrong mask or position gives 0.1 and more.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2}
# The delta rule is computed in float32, whatever the model's dtype.
_RECURRENT_TOLERANCE = 1e-4


class Found(NamedTuple):
    """What is known of a model that passed the check: slot shapes of its layers, and how they attend."""

    shapes: tuple[LayerShape | StateShape, ...]
    heads: frozenset[Heads]


# Of the models that passed, and their adapters then; keyed by the model, so that nothing outlives it. Weights may
# change, structure does not.
_checked: WeakKeyDictionary[nn.Module, tuple[Found, list[str]]] = WeakKeyDictionary()


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


def shapes_of(model: PreTrainedModel) -> tuple[LayerShape | StateShape, ...]:
    """Returns what a slot holds of each layer of a model that was checked."""
    return _checked[model][0].shapes


def heads_of(model: PreTrainedModel) -> frozenset[Heads]:
    """Returns how the layers of a model that was checked attend."""
    return _checked[model][0].heads


def packed_logits(model: PreTrainedModel, packed: Packed, cache: SlotCache, heads: set[Heads] | None = None) -> Tensor:
    """Returns logits [L, V] of a packed row, whose K/V go into the cache; how its layers attend is added to `heads`."""
    cache.packed = packed
    with packed_attention(packed, cache.windows) as attention, packed_recurrence(packed):
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
    if heads is not None:
        heads |= attention.heads
    return output.logits[0]


def _compare_with_stock(model: PreTrainedModel) -> Found:
    """Returns what is to know of the model's layers after checking a packed forward against the stock one.

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
        cache, heads = SlotCache(shapes, slots=2, length=9, dtype=dtypes.pop(), device=device), set[Heads]()
        try:
            first, second = (
                _accepted_logits(model, _ragged(rows, start, end), cache, heads)
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
    return Found(shapes, frozenset(heads))


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Returns how far two tensors lie apart, as a share of the expected one. To be weighed against `TOLERANCE`."""
    return ((found - expected).norm() / expected.norm()).item()


def _cause(model: PreTrainedModel) -> str:
    """Returns what makes packed rows of a model differ from plain ones."""
    if getattr(model, "is_quantized", False):
        return "its quantised layers round activations too, so that the last bits of a row are not its own"
    return "its attention does not go through Transformers' attention interface as dcut needs"


def _accepted_logits(model: PreTrainedModel, packed: Packed, cache: SlotCache, heads: set[Heads]) -> Tensor:
    """Returns logits [L, V] of a packed row, all rows of which become the slots' content."""
    logits = packed_logits(model, packed, cache, heads)
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
