"""From the values of a config.json to the fields of `DFlashConfig`, by the rules that all formats share.

block_size, mask_token_id, target_layer_ids     in `dflash_config` first, else at the top
rope_theta                                      at the top first, else in `rope_parameters`
rope_scaling                                    at the top first, else `rope_parameters` with a `rope_type`
sliding window                                  `layer_types` with `sliding_window`, or `use_swa`
causality                                       `is_causal`, else `dflash_config.causal`, else sliding layers are
"""

from __future__ import annotations

from typing import Any

from transformers.activations import ACT2FN

from hf_dcut.drafters.dflash.lookup import (
    Values,
    count,
    flag,
    index,
    is_index,
    optional_count,
    positive,
    section,
)

# Keys that ask for maths which this drafter does not do: key, what it is, and which values leave it off.
_OFF: tuple[object, ...] = (None, False, 0)
_UNSUPPORTED: tuple[tuple[str, str, tuple[object, ...]], ...] = (
    ("quantization_config", "quantised weights", (None,)),
    ("is_neox_style", "interleaved rotary embedding", (None, True)),
    ("use_aux_hidden_state", "a drafter without taps", (None, True)),
    ("logit_scale", "scaled logits", (None, 1)),
    ("markov_rank", "a Markov head", _OFF),
    ("enable_confidence_head", "a confidence head", _OFF),
    ("enable_hidden_correction", "DFly's correction of hidden states", _OFF),
    ("projector_type", "another projector", (None, "dflash")),
    ("shift_label", "Domino's shifted labels", _OFF),
    ("model_arch", "another model", (None, "dflash")),
    ("fusion_type", "another fusion of taps", (None, "concat_fc")),
    ("fc_norm", "a norm before fc", _OFF),
    ("norm_before_fc", "a norm before fc", _OFF),
    ("draft_ffn_type", "experts", (None, "dense")),
)
# RoPE kinds that Transformers computes from the config alone; others look at the batch.
_SCALED = ("linear", "llama3", "yarn")


def read_fields(values: Values, nested: Values) -> Values:
    """Returns the fields of `DFlashConfig`.

    Args:
        values: the top level of a config.json.
        nested: what stands under `dflash_config`, which wins.

    Raises:
        ValueError: something that is missing, makes no sense, or is not supported; named.
    """
    inner = {**values, **{key: value for key, value in nested.items() if value is not None}}
    _refuse(values, nested)
    return {**_shape(values), **_rope(values), **_attention(values, inner), **_block(inner), **_extras(inner)}


def _shape(values: Values) -> Values:
    hidden, heads = count(values, "hidden_size"), count(values, "num_attention_heads")
    head_dim = count(values, "head_dim", hidden // heads)
    for key, ours, size in (("target_hidden_size", "hidden_size", hidden), ("v_head_dim", "head_dim", head_dim)):
        if values.get(key) not in (None, size):
            raise _unsupported(f"a {key} of its own", f"{key}={values[key]!r}, {ours}={size}")
    optional = ("num_target_layers", "draft_vocab_size", "max_position_embeddings")
    return {
        **{key: optional_count(values, key) for key in optional},
        # null is how a drafter that was never told the target's vocabulary says so.
        "vocab_size": None if values.get("vocab_size", 0) is None else count(values, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": count(values, "intermediate_size"),
        "num_hidden_layers": count(values, "num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": count(values, "num_key_value_heads", heads),
        "head_dim": head_dim,
        "rms_norm_eps": positive(values, "rms_norm_eps"),
        "hidden_act": _activation(values),
        "dtype": values.get("dtype") or values.get("torch_dtype"),
    }


def _activation(values: Values) -> str:
    name = values.get("hidden_act") or "silu"
    if not isinstance(name, str) or name not in ACT2FN:
        raise ValueError(f"config.json hidden_act={name!r}: Transformers knows no activation of that name")
    return name


def _rope(values: Values) -> Values:
    """Returns the rotary embedding: flat in older configs, nested since Transformers 5, both in some."""
    nested = section(values, "rope_parameters")
    if any(isinstance(value, dict) for value in nested.values()):
        raise _unsupported("a RoPE for each layer type", f"rope_parameters={nested!r}")
    theta = values if values.get("rope_theta") is not None else nested
    partial = values if values.get("partial_rotary_factor") is not None else nested
    return {
        "rope_theta": positive(theta, "rope_theta"),
        "rope_scaling": _scaling(section(values, "rope_scaling") or nested),
        "partial_rotary_factor": positive(partial, "partial_rotary_factor", 1.0),
    }


def _scaling(rope: Values) -> dict[str, Any] | None:
    """Returns the numbers of a scaled RoPE, with its type; None for the plain one."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind not in _SCALED:
        raise _unsupported(f"the RoPE type {kind}", f"{rope!r}", f"{', '.join(_SCALED)} and the default are")
    needed = {"linear": (), "yarn": (), "llama3": ("low_freq_factor", "high_freq_factor")}[kind]
    for key in ("factor", *needed):
        positive(rope, key)
    if kind != "linear":
        count(rope, "original_max_position_embeddings")
    elsewhere = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "truncate")
    # Transformers takes a zero for "not given".
    numbers = {key: value for key, value in rope.items() if key not in elsewhere and value not in (None, 0)}
    for key in numbers:
        positive(numbers, key)
    truncate = flag(rope, "truncate")
    return {"rope_type": kind, **numbers, **({} if truncate is None else {"truncate": truncate})}


def _attention(values: Values, inner: Values) -> Values:
    sinks = flag(inner, "attention_sink_bias")
    return {
        "attention_bias": bool(flag(values, "attention_bias")),
        "attention_sink_bias": bool(flag(values, "add_swa_attention_sink_bias") if sinks is None else sinks),
        "attention_value_scale": positive(inner, "attention_value_scale", 1.0),
        **_windows(values, inner, count(values, "num_hidden_layers")),
    }


def _windows(values: Values, inner: Values, layers: int) -> Values:
    """Returns the layers' types, the window and the causality.

    `use_swa` makes all layers slide, and none of them causal, where `layer_types` does not say otherwise.
    """
    types, causal = _layer_types(values), flag(values, "is_causal")
    causal = flag(inner, "causal") if causal is None else causal
    if flag(inner, "use_swa") and "sliding_attention" not in (types or ()):
        types, causal = ("sliding_attention",) * layers, False if causal is None else causal
    if types is not None and "sliding_attention" not in types:
        return {"layer_types": types, "is_causal": causal}
    window = optional_count(inner, "swa_window_size") or optional_count(values, "sliding_window")
    if types is None and window is not None and flag(values, "use_sliding_window") is not False:
        # A window without layer types may or may not be in use; only an explicit "no" says that it is not.
        raise _unsupported("a sliding window on unnamed layers", f"sliding_window={window!r} and no layer_types")
    return {"layer_types": types, "is_causal": causal, "sliding_window": None if types is None else window}


def _layer_types(values: Values) -> tuple[str, ...] | None:
    types = values.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list | tuple):
        raise ValueError(f"config.json layer_types={types!r}: a list with one type a layer is needed")
    other = sorted({str(kind) for kind in types} - {"full_attention", "sliding_attention"})
    if other:
        raise _unsupported(f"the layer type {', '.join(other)}", f"layer_types={types!r}")
    if "sliding_attention" in types and flag(values, "use_sliding_window") is False:
        raise ValueError(
            f"config.json layer_types={types!r} and use_sliding_window=False contradict each other: find out which the "
            "drafter was trained with, and correct the other"
        )
    return tuple(types)


def _block(inner: Values) -> Values:
    return {
        "block_size": count(inner, "block_size"),
        "mask_token_id": index(inner, "mask_token_id"),
        "target_layer_ids": _target_layer_ids(inner),
        "sample_from_anchor": bool(flag(inner, "sample_from_anchor")),
    }


def _target_layer_ids(inner: Values) -> tuple[int, ...]:
    """Returns the tapped target layers, which no formula can replace: drafters differ in how they were chosen."""
    ids = inner.get("target_layer_ids")
    if not isinstance(ids, list | tuple) or not ids or not all(is_index(i) for i in ids):
        raise ValueError(
            f"config.json target_layer_ids={ids!r}: the drafter cannot run without the list of target layers it was "
            "trained on, numbered from 0. Add it to dflash_config, from the drafter's training or its author"
        )
    return tuple(ids)


def _extras(inner: Values) -> Values:
    """Returns what DFlash2 adds, and what is done to embeddings and logits."""
    cap, scale = inner.get("final_logit_softcapping"), inner.get("input_embedding_scale")
    keys = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    return {
        **{key: optional_count(inner, key) for key in keys},
        "input_embedding_scale": None if scale is None else positive(inner, "input_embedding_scale"),
        "output_multiplier": positive(inner, "output_multiplier", 1.0),
        "final_logit_softcapping": positive(inner, "final_logit_softcapping") if cap else None,
    }


def _refuse(values: Values, nested: Values) -> None:
    """Raises ValueError when a key asks for maths that this drafter does not do."""
    for key, what, off in _UNSUPPORTED:
        for place in (values, nested):
            if place.get(key) not in off:
                raise _unsupported(what, f"{key}={place[key]!r}")


def _unsupported(what: str, found: str, advice: str = "use a DFlash drafter without it") -> ValueError:
    return ValueError(f"config.json asks for {what} ({found}), which is not supported: {advice}")
