"""A target in four bits on a CPU says with dcut what it says without; one in eight bits is refused, with the reason.

Weights in four bits multiply in float32, in which packed and padded rows round differently: where a row differs, plain
`generate` must have had two tokens that were all but equal.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from hf_dcut.drafters import DFlashDrafter
from hf_dcut.drafters.base import Drafter
from hf_dcut.target import Target

pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
pytestmark = pytest.mark.extras

Inputs = dict[str, torch.Tensor]
D, NEW = 4, 20
# Rounding moves a logit by some 1e-5 here; a wrong token has lost by whole units.
CLOSE = 1e-3
WIDE: dict[str, Any] = {"vocab_size": 128, "eos_token_id": None}


@pytest.fixture(scope="module")
def folder(tiny_llama: Callable[..., PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama in float32, with a vocabulary that four bits can be packed for."""
    path = tmp_path_factory.mktemp("wide")
    tiny_llama(torch.float32, **WIDE).save_pretrained(path)
    return path


def load(folder: Path, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    config = BitsAndBytesConfig(**options)
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=dtype, device_map="cpu"
    ).eval()


def margins(plain: Any, sequences: torch.Tensor) -> list[float]:
    """Returns, for each row that differs, how far plain generate's two best logits lay apart where it first does."""
    found, first = [], plain.sequences.shape[1] - len(plain.logits)
    for row, unequal in enumerate(plain.sequences != sequences):
        if unequal.any():
            best = plain.logits[int(unequal.nonzero()[0]) - first][row].topk(2).values
            found.append(float(best[0] - best[1]))
    return found


@pytest.mark.parametrize("whole", [False, True], ids=["head kept", "head too"])
def test_four_bits(
    folder: Path,
    inputs: Inputs,
    knowing: Callable[..., Drafter],
    tiny_llama: Callable[..., PreTrainedModel],
    whole: bool,
) -> None:
    kept = {"llm_int8_skip_modules": ["nothing"]} if whole else {}
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    model = load(folder, torch.float32, **four, **kept)
    assert model.model.layers[0].self_attn.q_proj.weight.dtype == torch.uint8
    assert (model.lm_head.weight.dtype == torch.uint8) == whole
    options = {"do_sample": False, "max_new_tokens": NEW}
    plain = model.generate(**inputs, **options, output_logits=True, return_dict_in_generate=True)
    wide = tiny_llama(torch.float32, **WIDE).generate(**inputs, **options)
    assert not torch.equal(plain.sequences, wide), "the weights are rounded"
    shape: dict[str, Any] = {"taps": [0, 2], "mask_token_id": 3, "block_size": D + 1, "layers": 2}
    dflash = DFlashDrafter.random(model.config, draft_ids=range(0, 101, 2), **shape)
    for drafter in (dflash, knowing(inputs, plain.sequences)):
        output = model.generate(**inputs, **options, assistant_model=drafter, dcut=0.5)
        assert all(margin < CLOSE for margin in margins(plain, output))


def test_eight_bits_round_activations(folder: Path) -> None:
    model = load(folder, torch.float32, load_in_8bit=True)
    with pytest.raises(ValueError, match=r"other logits for packed rows.*quantised layers round activations"):
        Target(model)
