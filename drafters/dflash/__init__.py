"""DFlash: a small block drafter that reads the target's own hidden states (arXiv 2602.06036)."""

from hf_dcut.drafters.dflash.config import DFlashConfig
from hf_dcut.drafters.dflash.drafter import DFlashDrafter
from hf_dcut.drafters.dflash.model import DFlashModel

__all__ = ["DFlashConfig", "DFlashDrafter", "DFlashModel"]
