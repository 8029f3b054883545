"""What a drafter's folder or repository holds, and what is wrong with it: `hf-dcut inspect`.

Of a folder only the config and the headers of the weights are read. A repository is downloaded first.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from transformers import AutoConfig

from hf_dcut.drafters import checkpoint
from hf_dcut.drafters.dflash import fitting, weights
from hf_dcut.drafters.dflash.config import DFlashConfig
from hf_dcut.drafters.dflash.dialects import Dialect, find
from hf_dcut.drafters.dflash.lookup import Values
from hf_dcut.drafters.dflash.model import DFlashModel

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Inspection:
    """What was found.

    Attributes:
        name: of the drafter, as it was asked for.
        facts: {what: how it is}, in the order they are printed.
        problems: why the drafter cannot be used, or not with the target; empty when it can.
        notes: what to know when it is used.
    """

    name: str
    facts: dict[str, str]
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        width = max(map(len, self.facts), default=0)
        lines = [self.name, *(f"  {what:<{width}}  {how}" for what, how in self.facts.items())]
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  PROBLEM: {problem}" for problem in self.problems] or ["  no problems found"]
        return "\n".join(lines)


def inspect(
    name: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = None,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
) -> Inspection:
    """Returns what a drafter is and what is wrong with it.

    Args:
        name: a folder, or a Hub repository such as "owner/drafter".
        target: folder or Hub id of the model it is meant for, whose config alone is read; None to leave that out.
        revision, subfolder: as for `AutoDrafter.from_pretrained`.

    Raises:
        FileNotFoundError: no such folder or repository, or no config in it.
        ValueError: a config.json that is none.
        OSError: no such target.
    """
    folder = checkpoint.locate(name, revision, subfolder)
    values = checkpoint.read_config(folder)
    goal = None if target is None else AutoConfig.from_pretrained(target)
    try:
        dialect, config = find(values), DFlashConfig.from_dict(values)
    except ValueError as error:
        return Inspection(os.fspath(name), {}, (str(error),), ())
    facts = {"format": dialect.name, "target": _target(config, values), **_facts(config)}
    problems = [] if goal is None else fitting.config_faults(config, goal)
    try:
        shapes = _drafting(dialect.rename(checkpoint.read_shapes(folder)), config)
    except (FileNotFoundError, ValueError) as error:
        return Inspection(os.fspath(name), facts, (*problems, str(error)), tuple(fitting.notes(config)))
    facts["parameters"] = _parameters(config, shapes)
    problems += _weight_problems(dialect, config, shapes, folder)
    return Inspection(os.fspath(name), facts, tuple(problems), tuple(fitting.notes(config)))


def _drafting(shapes: Shapes, config: DFlashConfig) -> Shapes:
    """Returns the shapes without maps that no model holds, as when the weights are read."""
    whole = config.draft_vocab_size is None and shapes.get("d2t") == (config.vocab_size,)
    return {name: shape for name, shape in shapes.items() if name != "t2d" and not (whole and name == "d2t")}


def _weight_problems(dialect: Dialect, config: DFlashConfig, shapes: Shapes, folder: Path) -> list[str]:
    try:
        with torch.device("meta"):
            model = DFlashModel(config, weights.own_parts(shapes))
    except ValueError as error:
        return [str(error)]
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    faults = weights.shape_faults(wanted, shapes) + weights.needed_faults(dialect, shapes)
    return [f"the weights in {folder} do not fit their config.json: {fault}" for fault in faults]


def _target(config: DFlashConfig, values: Values) -> str:
    """Returns what the config says of the target: its name where it does, and its measures."""
    verifier = (values.get("speculators_config") or {}).get("verifier") or {}
    name = verifier.get("name_or_path") or values.get("target_model_name_or_path")
    layers = "layers not told" if config.num_target_layers is None else f"{config.num_target_layers} layers"
    vocabulary = "vocabulary not told" if config.vocab_size is None else f"vocabulary of {config.vocab_size}"
    return f"{name or 'name not told'}: {layers}, hidden size {config.hidden_size}, {vocabulary}"


def _facts(config: DFlashConfig) -> dict[str, str]:
    drafted = "the whole vocabulary" if config.draft_vocab_size is None else f"{config.draft_vocab_size} tokens"
    facts = {
        "taps": ", ".join(map(str, config.target_layer_ids)),
        "block": f"{config.block_size} rows, {config.draft_tokens} drafts from {drafted}",
        "mask": f"token {config.mask_token_id}",
        "layers": f"{config.num_hidden_layers}, {config.num_attention_heads} heads of {config.head_dim}, "
        f"{config.num_key_value_heads} for K/V",
        "window": _window(config),
        "rope": _rope(config),
    }
    extras = _extras(config)
    return {**facts, "extras": ", ".join(extras)} if extras else facts


def _window(config: DFlashConfig) -> str:
    """Returns what each layer's rows see, equal neighbours together: "4 x 2048 causal, 1 x all"."""
    runs: list[tuple[int, str]] = []
    for layer in range(config.num_hidden_layers):
        window, causal = config.sight(layer)
        sees = ("all" if window is None else str(window)) + (" causal" if causal else "")
        same = bool(runs) and runs[-1][1] == sees
        runs = [*runs[:-1], (runs[-1][0] + 1, sees)] if same else [*runs, (1, sees)]
    return ", ".join(f"{count} x {sees}" for count, sees in runs)


def _rope(config: DFlashConfig) -> str:
    kind = "default" if config.rope_scaling is None else f"{config.rope_scaling['rope_type']} {config.rope_scaling}"
    part = "" if config.rotary_dim == config.head_dim else f", {config.rotary_dim} of {config.head_dim} dimensions"
    return f"base {config.rope_theta:g}, {kind}{part}"


def _extras(config: DFlashConfig) -> list[str]:
    """Returns the parts that a plain DFlash drafter does not have."""
    present = {
        "attention biases": config.attention_bias,
        "attention sinks": config.attention_sink_bias,
        f"values times {config.attention_value_scale:g}": config.attention_value_scale != 1.0,
        f"convolutions of {config.conv_kernel_size} rows": config.conv_kernel_size is not None,
        f"selector among {config.selector_top_k}": config.selector_rank is not None,
        f"logits times {config.output_multiplier:g}": config.output_multiplier != 1.0,
        f"logits capped at {config.final_logit_softcapping}": config.final_logit_softcapping is not None,
        f"embeddings times {config.input_embedding_scale}": config.input_embedding_scale not in (None, 1.0),
        "rows predict the token after their own": config.sample_from_anchor,
    }
    return [what for what, there in present.items() if there]


def _parameters(config: DFlashConfig, shapes: Shapes) -> str:
    count = sum(prod(shape) for name, shape in shapes.items() if name != "d2t")
    own = weights.own_parts(shapes)
    brings = f", with its own {', '.join(own)}" if own else ", embeddings and head of the target"
    return f"{count / 1e6:,.1f} M, saved in {config.dtype or 'a dtype not told'}{brings}"
