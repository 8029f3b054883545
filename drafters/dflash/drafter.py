"""`DFlashDrafter`: a DFlash model as a drafter, and the check that it belongs to the target."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from hf_dcut.drafters import checkpoint
from hf_dcut.drafters.base import Drafter
from hf_dcut.drafters.dflash import fitting
from hf_dcut.drafters.dflash.bound import BoundDFlash, layer_shape
from hf_dcut.drafters.dflash.config import DFlashConfig
from hf_dcut.drafters.dflash.model import DFlashModel

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)


class DFlashDrafter(Drafter):
    """A block drafter: one forward of a few layers proposes a block of tokens for every request.

    Args:
        model: its weights.
    """

    def __init__(self, model: DFlashModel):
        self.model, self.config = model, model.config
        self.draft_tokens = self.config.draft_tokens
        self.taps, self.layers, self.networks = self.config.target_layer_ids, model.layers, [model]
        # A selector chooses each draft by the one before it.
        self.independent = self.branches = model.candidate_selector is None

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        *,
        revision: str | None = None,
        subfolder: str | None = None,
        dtype: str | torch.dtype = "auto",
        device: torch.device | str | int | None = None,
        device_map: torch.device | str | int | dict[str, Any] | None = None,
    ) -> Self:
        """Returns a drafter read from a folder or from the Hub.

        Args:
            name: a folder, or a Hub repository such as "owner/drafter".
            revision: branch, tag or commit of the repository. Published drafters are retrained in place: pin a commit.
            subfolder: where in the folder or repository the drafter lies.
            dtype: of the weights and the drafter's K/V; "auto" takes what the config says.
            device: where the drafter runs, which must be where the target is; the CPU when None.
            device_map: the same under Transformers' name. A drafter is small and lies on one device; "auto" takes the
                accelerator if there is one.

        Raises:
            FileNotFoundError: no folder, repository, config or safetensors weights.
            ValueError: a drafter that is not supported, or weights that do not fit its config.
        """
        folder = checkpoint.locate(name, revision, subfolder)
        place = _one_device(device, device_map)
        drafter = cls(DFlashModel.load(folder, dtype)).to(place)
        for note in fitting.notes(replace(drafter.config, dtype=str(drafter.dtype).removeprefix("torch."))):
            logger.warning("%s: %s", name, note)
        return drafter

    @classmethod
    def from_module(cls, module: nn.Module, dtype: str | torch.dtype = "auto") -> Self:
        """Returns a drafter with the weights of a DFlash model that is loaded already, on the module's device.

        The weights are shared where no cast is needed. The module's own code is not used.

        Args:
            module: has a `config` and weights, both in a format that `from_pretrained` reads: a `DFlashDraftModel` of
                remote code, or Transformers' `MuseGlimmerAssistantModel`.
            dtype: of the weights; "auto" keeps the module's.

        Raises:
            ValueError: a drafter that is not supported, or weights that do not fit its config.
        """
        tensors, where = module.state_dict(), f"the weights of {type(module).__name__}"
        if dtype == "auto":
            dtype = next((t.dtype for t in tensors.values() if t.is_floating_point()), dtype)
        return cls(DFlashModel.of(checkpoint.config_of(module), tensors, dtype, where))

    @classmethod
    def random(
        cls,
        target_config: PreTrainedConfig,
        *,
        taps: Sequence[int],
        mask_token_id: int,
        block_size: int = 16,
        layers: int = 5,
        draft_ids: Sequence[int] | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Returns an untrained drafter for a target: for tests and benchmarks, and as the start of training.

        Args:
            target_config: the target's config, which gives the drafter its widths.
            taps: target layers it reads, from 0.
            mask_token_id: token that stands where a draft is wanted; best one that text never holds.
            block_size: the anchor and the drafts after it.
            layers: layers of the drafter.
            draft_ids: tokens that can be drafted, ascending; None for all.
            seed: of the weights.
            dtype: of the weights.
            device: where they are drawn and lie; each kind of device draws others.
        """
        config = _config_for(target_config, taps, mask_token_id, block_size, layers, draft_ids)
        # Not by torch's own initialisation, which draws from the global generator.
        with torch.device("meta"):
            model = DFlashModel(config)
        model = model.to_empty(device=device).eval().requires_grad_(False)
        generator = torch.Generator(device).manual_seed(seed)
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.normal_(0.0, 0.02, generator=generator)
            else:
                weight.fill_(1.0)
        if draft_ids is not None:
            ids = torch.as_tensor(draft_ids, dtype=torch.int64, device=device)
            model.d2t = ids - torch.arange(len(ids), device=device)
        return cls(model.to(dtype))

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes the drafter into a folder that `from_pretrained` reads, in z-lab's format."""
        self.model.save_pretrained(folder)

    def to(self, device: torch.device | str | int | None = None, dtype: torch.dtype | None = None) -> Self:
        """Moves or casts the weights in place, as `nn.Module.to` does. Not while a call is using them."""
        self.model.to(device=device, dtype=dtype)
        return self

    @property
    def device(self) -> torch.device:
        """Where the drafter runs."""
        return self.model.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights and of the drafter's K/V."""
        return self.model.fc.weight.dtype

    def check(self, target: PreTrainedModel) -> None:
        """Raises ValueError when the drafter was not made for this target. Warns when either runs in float16."""
        faults = fitting.config_faults(self.config, target.config) + fitting.model_faults(self.model, target)
        if faults:
            raise ValueError("\n".join(faults))
        for who, dtype in (("target", target.dtype), ("drafter", self.dtype)):
            if dtype == torch.float16:
                warnings.warn(fitting.float16_note(who), stacklevel=2)

    @torch.no_grad()
    def bind(self, target: PreTrainedModel, slots: int, length: int) -> BoundDFlash:
        """Returns the drafter with state for `slots` requests of `length` cells, its block among them."""
        return BoundDFlash(self.model, target, slots, length)

    def cell_bytes(self, target: PreTrainedModel) -> int:
        """Returns the bytes that one cell of one slot takes in all draft layers."""
        return layer_shape(self.config).elements * self.config.num_hidden_layers * self.dtype.itemsize

    def fingerprint(self) -> dict[str, object]:
        """Returns the drafter's config and the dtype it runs in."""
        return {"kind": "dflash", **self.config.to_dict(), "dtype": str(self.dtype).removeprefix("torch.")}


def _config_for(
    target_config: PreTrainedConfig,
    taps: Sequence[int],
    mask_token_id: int,
    block_size: int,
    layers: int,
    draft_ids: Sequence[int] | None,
) -> DFlashConfig:
    """Returns the config of a drafter as wide as its target."""
    target = target_config.get_text_config(decoder=True)
    # Where layers differ in width, as the first.
    layer = target.per_layer_config[0]
    heads = layer.num_attention_heads
    rope = getattr(target, "rope_parameters", None) or {}
    return DFlashConfig(
        hidden_size=target.hidden_size,
        intermediate_size=layer.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(layer, "num_key_value_heads", None) or heads,
        head_dim=getattr(layer, "head_dim", None) or target.hidden_size // heads,
        vocab_size=target.vocab_size,
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=tuple(taps),
        # The base alone: a target's RoPE scaling or partial rotation is not the drafter's.
        rope_theta=float(rope.get("rope_theta") or 10000.0),
        rms_norm_eps=float(getattr(target, "rms_norm_eps", 1e-6)),
        num_target_layers=target.num_hidden_layers,
        draft_vocab_size=None if draft_ids is None else len(draft_ids),
        max_position_embeddings=getattr(target, "max_position_embeddings", None),
    )


def _one_device(device: torch.device | str | int | None, device_map: object) -> torch.device | str | int:
    """Returns the device that `device=` or Transformers' `device_map=` asks for."""
    if device is not None and device_map is not None:
        raise ValueError(f"device={device!r} and device_map={device_map!r}: give one of them")
    if device_map == "auto":
        return torch.accelerator.current_accelerator() or "cpu"
    if isinstance(device_map, dict):
        if list(device_map) != [""]:
            raise ValueError(
                f"device_map={device_map!r}: a drafter lies on one device; give it by name, or {{'': device}}"
            )
        device_map = device_map[""]
    chosen = device if device_map is None else device_map
    if chosen is not None and not isinstance(chosen, torch.device | str | int):
        raise ValueError(f"device_map={chosen!r}: give a device such as 'cuda:0', or 'auto'")
    return "cpu" if chosen is None else chosen
