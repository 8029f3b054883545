"""The formats in which DFlash drafters are published: how each is told apart, read, and which names its weights have.

One table, `DIALECTS`, from the most particular to the most general; the first that recognises a config.json reads it.
Published configs keep the same value in different places, and a reader that guesses goes wrong in silence: the output
stays right and acceptance drops. So what a config does not say is an error, and what asks for maths that this drafter
does not do is refused by name. docs/drafters.md says where each format's meaning was taken from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from hf_dcut.drafters.dflash.fields import read_fields
from hf_dcut.drafters.dflash.lookup import Values, count, flag, is_index, optional_count, section

Weight = TypeVar("Weight")
ARCHITECTURE, ARCHITECTURE_2 = "DFlashDraftModel", "DFlash2DraftModel"


@dataclass(frozen=True)
class Dialect:
    """A format of DFlash drafters.

    Attributes:
        name: for people.
        recognises: whether a config.json is in this format.
        fields: from a config.json to the fields of `DFlashConfig`.
        renames: {start of a weight's name in this format: what it starts with in ours}, which is z-lab's.
        ignored: starts of the names of weights that take no part in drafting.
        needs: weights without which drafts would be poor and nothing else would show it, and where they come from.
    """

    name: str
    recognises: Callable[[Values], bool]
    fields: Callable[[Values], Values]
    renames: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    needs: Mapping[str, str] = field(default_factory=dict)

    def rename(self, weights: Mapping[str, Weight]) -> dict[str, Weight]:
        """Returns the weights (or their shapes) that take part in drafting, under the names that `DFlashModel` has."""
        return {self._ours(name): weight for name, weight in weights.items() if not name.startswith(self.ignored)}

    def _ours(self, name: str) -> str:
        for theirs, ours in self.renames.items():
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return name


def find(values: Values) -> Dialect:
    """Returns the format that a config.json is written in.

    Raises:
        ValueError: none that is known, or one that is known and not supported.
    """
    for name, recognises, why in REFUSED:
        if recognises(values):
            raise ValueError(f"config.json describes {name} ({_describe(values)}), which is not supported: {why}")
    for dialect in DIALECTS:
        if dialect.recognises(values):
            return dialect
    raise ValueError(
        f"config.json describes no DFlash drafter that is known ({_describe(values)}). "
        f"Supported: {', '.join(dialect.name for dialect in DIALECTS)}"
    )


def is_dflash(values: Values) -> bool:
    """Returns whether a config.json is one of a DFlash drafter, in any format, supported or not."""
    known = [dialect.recognises for dialect in DIALECTS] + [recognises for _, recognises, _ in REFUSED]
    return "dflash_config" in values or any(recognises(values) for recognises in known)


# How formats are recognised.


def _architecture(values: Values) -> str:
    architectures = values.get("architectures")
    return str(architectures[0]) if isinstance(architectures, list | tuple) and architectures else ""


def _named(*architectures: str) -> Callable[[Values], bool]:
    return lambda values: _architecture(values) in architectures


def _containing(part: str) -> Callable[[Values], bool]:
    return lambda values: part.lower() in _architecture(values).lower()


def _is_speculators(values: Values) -> bool:
    return values.get("speculators_model_type") in ("dflash", "dflash2")


def _is_muse(values: Values) -> bool:
    return values.get("model_type") == "muse_glimmer_assistant" or _architecture(values) == "MuseGlimmerAssistantModel"


def _is_angelspec(values: Values) -> bool:
    return values.get("target_num_hidden_layers") is not None and "dflash_config" not in values


def _is_mimo(values: Values) -> bool:
    nested = section(values, "dflash_config")
    return nested.get("use_swa") is not None and nested.get("attention_value_scale") is not None


def _is_z_lab(values: Values) -> bool:
    return _architecture(values) == ARCHITECTURE or (not _architecture(values) and "dflash_config" in values)


def _describe(values: Values) -> str:
    keys = ("architectures", "model_type", "speculators_model_type")
    return ", ".join(f"{key}={values[key]!r}" for key in keys if values.get(key)) or "no architectures, no model_type"


# How formats are read.


def _z_lab(values: Values) -> Values:
    return read_fields(values, section(values, "dflash_config"))


def _z_lab_2(values: Values) -> Values:
    nested = section(values, "dflash_config")
    for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        count({**values, **nested}, key)
    # Its code reads the embedding table itself, past what the target's module may do to the rows.
    return read_fields(values, {"input_embedding_scale": 1.0, **nested})


def _speculators(values: Values) -> Values:
    layers = section(values, "transformer_layer_config")
    merged = {**values, **layers, "dtype": values.get("dtype") or values.get("torch_dtype") or layers.get("dtype")}
    if merged.get("draft_vocab_size") == merged.get("vocab_size"):
        merged["draft_vocab_size"] = None
    if flag(values, "sliding_window_non_causal") is not False:
        # Also where the key is missing: then the drafter is older than causal sliding layers.
        merged["is_causal"] = False
    # Its embedding is a copy of the target's table, so what the target's module does to the rows plays no part.
    merged = {"block_size": 8, "input_embedding_scale": 1.0, **merged, "target_layer_ids": _shifted_taps(values)}
    return read_fields(merged, {})


def _shifted_taps(values: Values) -> list[int]:
    """Returns the tapped layers; speculators counts hidden states, the first of which is the embeddings' output."""
    ids = values.get("aux_hidden_state_layer_ids")
    if not isinstance(ids, list | tuple) or not ids or not all(is_index(i) and i > 0 for i in ids):
        raise ValueError(
            f"config.json aux_hidden_state_layer_ids={ids!r}: a list of hidden states from 1 is needed, where n is "
            "what comes out of layer n - 1. 0, the embeddings' output, cannot be tapped"
        )
    return [i - 1 for i in ids]


def _muse(values: Values) -> Values:
    types = values.get("layer_types") or ["sliding_attention"] * count(values, "num_hidden_layers")
    window = optional_count(values, "sliding_window")
    # Transformers' two-sided window holds the key that is `sliding_window` away; ours ends before it.
    window = None if window is None else window + 1
    told = {"vocab_size": None, **values, "layer_types": types, "sliding_window": window, "is_causal": False}
    return read_fields(told, {"input_embedding_scale": 1.0})


def _angelspec(values: Values) -> Values:
    depth = optional_count(values, "target_num_hidden_layers")
    return read_fields({**values, "num_target_layers": depth}, {"input_embedding_scale": 1.0})


def _deepspec(values: Values) -> Values:
    return read_fields({**values, "is_causal": False}, {"sample_from_anchor": True, "input_embedding_scale": 1.0})


_CODEBOOKS = {
    f"candidate_selector.{side}_codebook.weight": f"candidate_selector.{side}_codebook"
    for side in ("predecessor", "successor")
}
_VERIFIER = ("verifier_norm.", "verifier_lm_head.")

DIALECTS = (
    Dialect("speculators", _is_speculators, _speculators, _CODEBOOKS, _VERIFIER),
    Dialect(
        "Muse Glimmer assistant", _is_muse, _muse, {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
    ),
    Dialect(
        "AngelSpec",
        _is_angelspec,
        _angelspec,
        {"context_proj.": "fc.", "context_norm.": "hidden_norm.", "final_norm.": "norm."},
    ),
    Dialect("DeepSpec", _named("Qwen3DSparkModel"), _deepspec),
    Dialect("MiMo", _is_mimo, _z_lab, needs={"mask_embedding": "mask_embedding.pt"}),
    Dialect("z-lab DFlash2", _named(ARCHITECTURE_2), _z_lab_2, _CODEBOOKS),
    Dialect("z-lab DFlash", _is_z_lab, _z_lab),
)

# Relatives with other maths: name, how recognised, and why they are refused.
REFUSED: tuple[tuple[str, Callable[[Values], bool], str], ...] = (
    (
        "a speculator of another kind",
        lambda v: v.get("speculators_model_type") is not None and not _is_speculators(v),
        "only speculators_model_type='dflash' and 'dflash2' are",
    ),
    ("a DFlare drafter", _containing("DFlare"), "it fuses taps by learned weights and projects them layer by layer"),
    ("a DFly drafter", _containing("DFly"), "it adds a fusion of taps to each layer and corrects hidden states"),
    ("a Domino drafter", _containing("Domino"), "it corrects logits by a recurrent network over the drafted tokens"),
    (
        "a DSpark drafter",
        lambda v: _containing("DSpark")(v) and _architecture(v) != "Qwen3DSparkModel",
        "only Qwen3DSparkModel without its Markov head is",
    ),
)
