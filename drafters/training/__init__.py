"""Training of DFlash drafters on answers of their target: data, taps, blocks, loss, the loop."""

from hf_dcut.drafters.training.answers import Answer, read_answers
from hf_dcut.drafters.training.recipe import Recipe
from hf_dcut.drafters.training.tap_cache import TapCache
from hf_dcut.drafters.training.trainer import Trainer

__all__ = ["Answer", "Recipe", "TapCache", "Trainer", "read_answers"]
