"""The models that a GPU is checked with say what they must."""

from __future__ import annotations

import pytest
import torch

from hf_dcut.bench.gpu.shapes import SMALL, chain_margin, chain_model, random_prompts, successors, varied_model

CPU = torch.device("cpu")
DEEP = {**SMALL, "num_hidden_layers": 36}


@pytest.mark.parametrize("shape", [SMALL, DEEP], ids=["4 layers", "36 layers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_chain_has_one_successor_by_a_wide_margin(shape: dict[str, int], dtype: torch.dtype) -> None:
    model = chain_model(shape, CPU, dtype)
    assert chain_margin(model) > 1
    prompts = torch.tensor([[5, 9, 200], [7, 7, 511]])
    said = model.generate(input_ids=prompts, max_new_tokens=20, do_sample=False)[:, 3:]
    assert said.tolist() == [successors(last, 20, 512) for last in (200, 511)]


def test_successors_run_through_the_whole_vocabulary() -> None:
    for vocabulary in (512, 49152, 151936):
        assert len(set(successors(3, vocabulary, vocabulary))) == vocabulary


def test_a_margin_that_is_not_there_is_seen() -> None:
    model = chain_model(SMALL, CPU, torch.float32)
    model.get_output_embeddings().weight[11] *= -1
    model.get_output_embeddings().weight[12] = model.get_output_embeddings().weight[13]
    assert chain_margin(model, rows=16, width=256) <= 0


def test_varied_text_depends_on_its_first_token() -> None:
    model = varied_model(SMALL, CPU, torch.float32)
    ids = torch.randint(3, 512, (1, 12), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[0, 0] += 1
    said, otherwise = (model.generate(input_ids=x, max_new_tokens=24, do_sample=False)[0, 12:] for x in (ids, other))
    assert len(set(said.tolist())) > 6
    assert not torch.equal(said, otherwise)


def test_weights_are_the_same_every_time_and_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    one, other = (varied_model(SMALL, CPU, torch.float32) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_prompts_differ_in_length() -> None:
    prompts = random_prompts(20, 3, 9, 512)
    assert {len(prompt) for prompt in prompts} == set(range(3, 10))
    assert all(3 <= token < 512 for prompt in prompts for token in prompt)
    assert random_prompts(2, 5, 5, 512) == random_prompts(2, 5, 5, 512)
