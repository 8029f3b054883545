"""`DFlashConfig`: what a DFlash drafter's config.json says.

Published configs keep the same value in different places, and a reader that guesses goes wrong in silence: the output
stays right and acceptance drops. So values are looked up by the rules below, a missing one is an error, and whatever
this reader does not know to handle is refused by name.

    block_size, mask_token_id, target_layer_ids     in `dflash_config` first, else at the top
    rope_theta                                      at the top first, else in `rope_parameters`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeGuard

from hf_dcut.drafters.checkpoint import parse_dtype

Values = dict[str, Any]
ARCHITECTURE = "DFlashDraftModel"


@dataclass(frozen=True)
class DFlashConfig:
    """The shape of a DFlash drafter and of the target it belongs to.

    Attributes:
        hidden_size, vocab_size: as the target's.
        num_target_layers: decoder layers of the target; None when the config does not say.
        target_layer_ids: decoder layers of the target, from 0, whose output the drafter reads, in this order.
        block_size: the anchor and the drafts after it.
        mask_token_id: token that stands where a draft is wanted.
        draft_vocab_size: tokens that can be drafted; None for the whole vocabulary.
        intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim, hidden_act,
            attention_bias, rms_norm_eps, rope_theta, max_position_embeddings, layer_types: the drafter's own
            layers, named as Transformers names them.
        dtype: dtype the weights were saved in; None when the config does not say.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    rope_theta: float
    rms_norm_eps: float
    num_target_layers: int | None = None
    draft_vocab_size: int | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    max_position_embeddings: int | None = None
    layer_types: tuple[str, ...] | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise ValueError(f"block_size={self.block_size}: a block is an anchor and at least one draft, 2 or more")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}: check config.json"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: rotary embedding needs an even number")
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries and num_hidden_layers={self.num_hidden_layers}: "
                "give one type a layer"
            )
        if self.dtype is not None:
            parse_dtype(self.dtype)

    @classmethod
    def from_dict(cls, values: Values) -> DFlashConfig:
        """Returns the config that a config.json stands for.

        Raises:
            ValueError: a dialect or feature that is not supported, or a value that is missing or makes no sense.
        """
        dialect = dialect_of(values)
        if dialect not in _READERS:
            raise ValueError(
                f"config.json describes {_RECOGNISED.get(dialect, 'a drafter')} ({dialect}), which is not yet "
                f"supported. Supported: {', '.join(_READERS)}"
            )
        return cls(**_READERS[dialect](values))

    def to_dict(self) -> Values:
        """Returns the content of a config.json in z-lab's format."""
        elsewhere = ("mask_token_id", "target_layer_ids", "layer_types")
        values = {name: value for name, value in asdict(self).items() if value is not None and name not in elsewhere}
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen3",
            "dflash_config": {"mask_token_id": self.mask_token_id, "target_layer_ids": list(self.target_layer_ids)},
            **values,
            "layer_types": list(self.layer_types or ["full_attention"] * self.num_hidden_layers),
            "rope_scaling": None,
            "sliding_window": None,
            "tie_word_embeddings": False,
        }


def is_dflash(values: Values) -> bool:
    """Returns whether a config.json is one of a DFlash drafter, of any dialect, supported or not."""
    return dialect_of(values) in {*_READERS, *_RECOGNISED} or "dflash_config" in values


def dialect_of(values: Values) -> str:
    """Returns the name of the format a config.json is written in: its architecture, unless its keys say otherwise."""
    if "speculators_model_type" in values:
        return f"speculators {values['speculators_model_type']}"
    architectures = values.get("architectures") or []
    if "target_num_hidden_layers" in values and "target_layer_ids" in values:
        return "AngelSpec"
    if architectures:
        return str(architectures[0])
    return ARCHITECTURE if "dflash_config" in values else "no architecture"


# Formats that are known by name, so that the error says what was found.
_RECOGNISED = {
    "DFlash2DraftModel": "a DFlash2 drafter",
    "speculators dflash": "a DFlash drafter in the format of vLLM's speculators",
    "DFlashSpeculator": "a DFlash drafter in the format of vLLM's speculators",
    "Qwen3DSparkModel": "a DeepSpec drafter",
    "Qwen3DFlyModel": "a DFly drafter",
    "AngelSpec": "a DFlash drafter in AngelSpec's format",
}

# Features of z-lab's format that change the maths: key, what it is, and which values leave it off.
_OFF: tuple[object, ...] = (None, False, 0)
_FEATURES: tuple[tuple[str, str, tuple[object, ...]], ...] = (
    ("use_swa", "sliding-window attention", _OFF),
    ("attention_sink_bias", "attention sinks", _OFF),
    ("attention_value_scale", "scaled attention values", (None, 1)),
    ("partial_rotary_factor", "partial rotary embedding", (None, 1)),
    ("is_causal", "causal attention inside the block", _OFF),
    ("causal", "causal attention inside the block", _OFF),
    ("conv_kernel_size", "DFlash2's convolutions", _OFF),
    ("selector_rank", "DFlash2's candidate selector", _OFF),
    ("output_multiplier", "scaled logits", (None, 1)),
    ("final_logit_softcapping", "soft-capped logits", _OFF),
    ("shift_label", "labels shifted by one position", _OFF),
    ("sample_from_anchor", "a draft at the anchor's position", _OFF),
)


def _read_z_lab(values: Values) -> Values:
    """Returns the fields of z-lab's format."""
    nested = values.get("dflash_config") or {}
    _refuse_features(values, nested)
    layers = _count(values, "num_hidden_layers")
    hidden, heads = _count(values, "hidden_size"), _count(values, "num_attention_heads")
    inner = {**values, **{k: v for k, v in nested.items() if v is not None}}
    optional = {
        k: _count(values, k)
        for k in ("num_target_layers", "draft_vocab_size", "max_position_embeddings")
        if values.get(k) is not None
    }
    return {
        **optional,
        "hidden_size": hidden,
        "intermediate_size": _count(values, "intermediate_size"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _count(values, "num_key_value_heads", heads),
        "head_dim": _count(values, "head_dim", hidden // heads),
        "vocab_size": _count(values, "vocab_size"),
        "block_size": _count(inner, "block_size"),
        "mask_token_id": _index(inner, "mask_token_id"),
        "target_layer_ids": _target_layer_ids(inner),
        "rope_theta": _rope_theta(values),
        "rms_norm_eps": _positive(values, "rms_norm_eps"),
        "hidden_act": values.get("hidden_act") or "silu",
        "attention_bias": bool(values.get("attention_bias")),
        "layer_types": _layer_types(values),
        "dtype": values.get("dtype") or values.get("torch_dtype"),
    }


# Dialect -> how its config.json is read into the fields of `DFlashConfig`.
_READERS: dict[str, Callable[[Values], Values]] = {ARCHITECTURE: _read_z_lab}


def _refuse_features(values: Values, nested: Values) -> None:
    """Raises ValueError when a key asks for maths that this drafter does not do."""
    places = (values, nested, values.get("rope_parameters") or {}, values.get("rope_scaling") or {})
    for key, what, off in _FEATURES:
        for place in places:
            if place.get(key) not in off:
                raise _unsupported(what, f"{key}={place[key]!r}")
    for name in ("rope_parameters", "rope_scaling"):
        rope = values.get(name) or {}
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind != "default":
            raise _unsupported(f"the RoPE type {kind}", f"{name}={rope!r}", f"{kind} not yet supported")


def _layer_types(values: Values) -> tuple[str, ...] | None:
    """Returns the type of each layer, None when the config gives none; refuses all but full attention."""
    types, window = values.get("layer_types"), values.get("sliding_window")
    if types is not None:
        other = sorted({str(kind) for kind in types} - {"full_attention"})
        if other:
            raise _unsupported(
                f"the layer type {', '.join(other)}", f"layer_types={types!r}, sliding_window={window!r}"
            )
        return tuple(types)
    # A window without layer types may or may not be in use; only an explicit "no" says that it is not.
    if window is not None and values.get("use_sliding_window") is not False:
        raise _unsupported("sliding-window attention", f"sliding_window={window!r} and no layer_types")
    return None


def _target_layer_ids(values: Values) -> tuple[int, ...]:
    """Returns the tapped target layers, which no formula can replace: drafters differ in how they were chosen."""
    ids = values.get("target_layer_ids")
    if not isinstance(ids, list | tuple) or not ids or not all(_is_index(i) for i in ids):
        raise ValueError(
            f"config.json target_layer_ids={ids!r}: the drafter cannot run without the list of target layers it was "
            "trained on, numbered from 0. Add it to dflash_config, from the drafter's training or its author"
        )
    return tuple(ids)


def _rope_theta(values: Values) -> float:
    """Returns the base of the rotary embedding: flat in older configs, nested since Transformers 5, both in some."""
    if values.get("rope_theta") is not None:
        return _positive(values, "rope_theta")
    return _positive(values.get("rope_parameters") or {}, "rope_theta")


def _count(values: Values, key: str, default: int | None = None) -> int:
    value = default if values.get(key) is None else values[key]
    if not _is_index(value) or value == 0:
        raise ValueError(f"config.json {key}={value!r}: a positive integer is needed")
    return value


def _index(values: Values, key: str) -> int:
    value = values.get(key)
    if not _is_index(value):
        raise ValueError(f"config.json {key}={value!r}: an integer from 0 is needed")
    return value


def _positive(values: Values, key: str) -> float:
    value = values.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"config.json {key}={value!r}: a positive number is needed")
    return float(value)


def _is_index(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _unsupported(what: str, found: str, short: str = "not yet supported") -> ValueError:
    return ValueError(f"config.json asks for {what} ({found}): {short}. Use a DFlash drafter without it")
