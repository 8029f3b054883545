"""Who proposes. `AutoDrafter.from_pretrained` reads a drafter from a folder or the Hub; the others take arguments."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from torch import nn

from hf_dcut.drafters import checkpoint
from hf_dcut.drafters.base import BoundDrafter, Drafter
from hf_dcut.drafters.dflash import DFlashDrafter
from hf_dcut.drafters.dflash.config import is_dflash
from hf_dcut.drafters.names import named_drafter

__all__ = ["DRAFTERS", "AutoDrafter", "BoundDrafter", "DFlashDrafter", "Drafter", "is_drafter"]

# Kind of drafter -> its class.
DRAFTERS: dict[str, type[Drafter]] = {"dflash": DFlashDrafter}


class AutoDrafter:
    """Reads drafters of any kind. Not made itself: its methods return the drafter."""

    @staticmethod
    def from_pretrained(
        name: str | os.PathLike[str], *, revision: str | None = None, subfolder: str | None = None, **options: Any
    ) -> Drafter:
        """Returns the drafter in a folder or a Hub repository, of the kind its config.json tells.

        Args:
            name: a folder, or a Hub repository such as "owner/drafter".
            revision: branch, tag or commit of the repository. Published drafters are retrained in place: pin a commit.
            subfolder: where in the folder or repository the drafter lies.
            options: dtype, device or device_map, as the drafter's own `from_pretrained` takes them.

        Raises:
            FileNotFoundError: no folder, repository, config or weights.
            ValueError: a kind that is not known.
        """
        folder = checkpoint.locate(name, revision, subfolder)
        config = checkpoint.read_config(folder)
        if is_dflash(config):
            return DFlashDrafter.from_pretrained(folder, **options)
        raise ValueError(f"{name} {_unknown(config)}")

    @staticmethod
    def named(name: str, **options: Any) -> Drafter:
        """Returns the drafter that a command names: as `from_pretrained`, "lookup", "suffix", or several at once.

        Args:
            name: a folder or Hub id, "lookup" for prompt lookup, "suffix" for a `SuffixDrafter`, or several of them
                joined by "+", what is to be loaded first.
            options: of `from_pretrained`, for what is read.

        Raises:
            ValueError: a name that is none, and as of `from_pretrained`.
            FileNotFoundError: as of `from_pretrained`.
        """
        return named_drafter(name, partial(AutoDrafter.from_pretrained, **options))

    @staticmethod
    def from_module(module: nn.Module) -> Drafter:
        """Returns the drafter that an already loaded model is, with its weights but without its code.

        Args:
            module: such as a `DFlashDraftModel` of remote code, or Transformers' `MuseGlimmerAssistantModel`.

        Raises:
            TypeError: a model of a kind that is not known.
            ValueError: one that is known but not supported.
        """
        if is_drafter(module):
            return DFlashDrafter.from_module(module)
        raise TypeError(f"{type(module).__name__} {_unknown(checkpoint.config_of(module))}")


def is_drafter(module: nn.Module) -> bool:
    """Returns whether a loaded model is a drafter of a kind that is known, supported or not."""
    return is_dflash(checkpoint.config_of(module))


def _unknown(config: dict[str, Any]) -> str:
    return (
        f"is no drafter that is known: its config has architectures={config.get('architectures')!r} and "
        f"model_type={config.get('model_type')!r}. Known: DFlash, in the formats of docs/drafters.md. "
        "A smaller causal language model is not a DFlash drafter"
    )
