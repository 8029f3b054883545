"""Log-probabilities of the chosen tokens: those that the scores of plain `generate` give, without keeping scores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel

from hf_dcut import PerRequest
from hf_dcut.drafters import DFlashDrafter
from hf_dcut.drafters.base import Drafter

Inputs = dict[str, torch.Tensor]
ROWS, NEW, D = 5, 24, 6
# float32 rounds the float64 logits of the packed and the padded forward to neighbours at most, and adds up 101 of them.
ROUNDING = 1e-5
FULL = {"max_new_tokens": NEW, "return_dict_in_generate": True}


class BanLast(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, input_ids[:, -1:], -torch.inf)


def from_scores(model: PreTrainedModel, output: Any) -> torch.Tensor:
    return model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)


def lengths(output: Any, width: int) -> list[int]:
    rows = output.sequences[:, width:].tolist()
    return [next((k for k, token in enumerate(row, start=1) if token in (40, 77)), NEW) for row in rows]


@pytest.mark.parametrize("budget", ["none", 1.0, 0.4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.7, "min_new_tokens": 9},
        {"logits_processor": [PerRequest(lambda row: BanLast())], "no_repeat_ngram_size": 2},
    ],
    ids=["nothing", "the text", "walked"],
)
def test_greedy_ones_are_those_of_plain_generate(
    model: PreTrainedModel, inputs: Inputs, knowing: Callable[..., Drafter], options: dict[str, Any], budget: Any
) -> None:
    plain = model.generate(**inputs, **FULL, do_sample=False, **options, output_scores=True)
    wanted, width = from_scores(model, plain), inputs["input_ids"].shape[1]
    ours = model.generate(
        **inputs,
        **FULL,
        do_sample=False,
        **options,
        output_logprobs=True,
        assistant_model=knowing(inputs, plain.sequences, D),
        dcut=budget,
    )
    assert torch.equal(ours.sequences, plain.sequences)
    assert (ours.logprobs.dtype, ours.logprobs.shape) == (torch.float32, (ROWS, ours.sequences.shape[1] - width))
    assert ours.scores is None
    for row, length in enumerate(lengths(plain, width)):
        torch.testing.assert_close(ours.logprobs[row, :length], wanted[row, :length], rtol=ROUNDING, atol=ROUNDING)
        assert not ours.logprobs[row, length:].any(), "0 behind the end"
    assert (ours.logprobs.sum(dim=1) < 0).all()


@pytest.mark.parametrize(
    "options", [{"temperature": 0.7, "top_k": 5}, {"top_k": 0, "repetition_penalty": 1.3}], ids=str
)
def test_sampled_ones_are_those_of_the_scores_at_every_budget(
    model: PreTrainedModel, inputs: Inputs, knowing: Callable[..., Drafter], options: dict[str, Any]
) -> None:
    asked = {**FULL, "do_sample": True, "seed": 3, **options, "output_logprobs": True}
    alone = model.generate(**inputs, **asked, output_scores=True, dcut="none")
    torch.testing.assert_close(alone.logprobs, from_scores(model, alone))
    drafter = knowing(inputs, alone.sequences, D)
    ours = model.generate(**inputs, **asked, assistant_model=drafter, dcut=0.4)
    torch.testing.assert_close(ours.logprobs, alone.logprobs, rtol=ROUNDING, atol=ROUNDING)


def test_drawn_drafts_have_the_targets_log_probability(model: PreTrainedModel, inputs: Inputs) -> None:
    shape = {"taps": [0, 2], "mask_token_id": 3, "block_size": D + 1, "layers": 1, "dtype": model.dtype}
    ours = model.generate(
        **inputs,
        **{**FULL, "do_sample": True, "top_k": 4, "output_logprobs": True, "output_scores": True},
        assistant_model=DFlashDrafter.random(model.config, **shape),
        dcut={"budget": 0.6, "proposals": "sampled"},
    )
    assert ours.stats.drafted_steps > 0
    torch.testing.assert_close(ours.logprobs, from_scores(model, ours))


@pytest.mark.parametrize("how", ["object", "saved"])
def test_a_generation_config_may_ask_for_them(model: PreTrainedModel, inputs: Inputs, tmp_path: Path, how: str) -> None:
    config = GenerationConfig(**FULL, do_sample=False, pad_token_id=0, dcut="none", output_logprobs=True)
    if how == "saved":
        config.save_pretrained(tmp_path)
        config = GenerationConfig.from_pretrained(tmp_path)
    assert model.generate(**inputs, generation_config=config).logprobs is not None
    assert model.generate(**inputs, generation_config=config, output_logprobs=False).logprobs is None


def test_nobody_gets_them_unasked(model: PreTrainedModel, inputs: Inputs) -> None:
    output = model.generate(**inputs, **FULL, do_sample=False, dcut="none")
    assert output.logprobs is None
    assert output.finish_reasons == output.stats.finish_reasons
    assert set(output.finish_reasons) == {"eos", "length"}


def test_a_tensor_cannot_hold_them(model: PreTrainedModel, inputs: Inputs) -> None:
    with pytest.raises(ValueError, match="output_logprobs=True needs an output to hold them: pass return_dict_in_gen"):
        model.generate(**inputs, max_new_tokens=3, dcut="none", output_logprobs=True)
    with pytest.raises(TypeError, match="output_logprobs=5: give True or False"):
        model.generate(**inputs, **FULL, dcut="none", output_logprobs=5)
