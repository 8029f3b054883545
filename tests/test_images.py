"""Prompts with images: with dcut, `generate` says what it says without, in float64.

Three families that differ in how an image is placed: Qwen3-VL and Qwen2.5-VL give its patches positions in time, height
and width (Qwen3-VL also adds to the first layers' outputs), in Gemma 3 an image's tokens see each other both ways,
through windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    GPT2Config,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
)

from hf_dcut import BatchRequest, DCutConfig, DCutOutput, PromptLookupDrafter, generate_batch
from hf_dcut.assembly import open_engine
from hf_dcut.drafters import DFlashDrafter
from hf_dcut.drafters.base import Drafter
from hf_dcut.generation import prepare
from hf_dcut.types import Committed

Inputs = dict[str, torch.Tensor]
# Tokens before the image, its patches in time, height and width, tokens behind it.
Row = tuple[int, tuple[int, int, int] | None, int]
D, NEW = 4, 20
SLACK = 1e-10  # float64 in another order of summation

TEXT: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4}
VISION |= {"out_hidden_size": 64, "initializer_range": 0.2}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
BEGIN, END, IMAGE, VIDEO = 95, 96, 97, 98
TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": BEGIN, "vision_end_token_id": END}
SIGLIP = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
KINDS: dict[str, Callable[[], Any]] = {
    "qwen3 vl": lambda: Qwen3VLConfig(
        text_config=TEXT | {"head_dim": 16, "rope_parameters": ROPE | {"mrope_interleaved": True}},
        vision_config=VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        tie_word_embeddings=False,
        **TOKENS,
    ),
    "qwen2.5 vl": lambda: Qwen2_5_VLConfig(
        text_config=TEXT | {"rope_parameters": ROPE},
        vision_config=VISION | {"spatial_patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]},
        tie_word_embeddings=False,
        **TOKENS,
    ),
    "gemma 3": lambda: Gemma3Config(
        text_config=TEXT
        | {
            "head_dim": 16,
            "sliding_window": 4,
            "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding")],
        },
        vision_config=SIGLIP | {"image_size": 16, "patch_size": 4},
        mm_tokens_per_image=4,
        boi_token_id=BEGIN,
        eoi_token_id=END,
        image_token_id=IMAGE,
        tie_word_embeddings=False,
    ),
}
ONE: list[Row] = [(3, (1, 4, 6), 5)]
THREE: list[Row] = [(3, (1, 4, 6), 5), (2, None, 3), (0, (1, 8, 4), 9)]
TEXTS: list[Row] = [(4, None, 2), (9, None, 1)]


def build(kind: str) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(KINDS[kind](), dtype=torch.float64).eval()
        if kind == "gemma 3":  # begins with zeros, through which no image is seen
            model.model.multi_modal_projector.mm_input_projection_weight.data.normal_(0, 0.2)
    return model


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return {kind: build(kind) for kind in KINDS}


def prompts(kind: str, rows: Sequence[Row], seed: int = 1) -> Inputs:
    """Returns what a processor would: left-padded tokens, which of them are images, and their pixels."""
    chance = torch.Generator().manual_seed(seed)
    gemma, ids, types, pixels, grids = kind == "gemma 3", [], [], [], []
    for before, grid, behind in rows:
        first, last = (torch.randint(3, 90, (n,), generator=chance).tolist() for n in (before, behind))
        seen: list[int] = []
        if grid:
            patches = grid[0] * grid[1] * grid[2]
            seen = [BEGIN, *[IMAGE] * (4 if gemma else patches // 4), END]
            shape = (3, 16, 16) if gemma else (patches, 3 * 2 * 4 * 4)
            pixels.append(torch.randn(shape, generator=chance, dtype=torch.float64))
            grids.append(grid)
        ids.append([*first, *seen, *last])
        types.append([int(token == IMAGE) for token in ids[-1]])
    width = max(map(len, ids))
    inputs = {
        "input_ids": torch.tensor([[0] * (width - len(row)) + row for row in ids]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids]),
        "token_type_ids" if gemma else "mm_token_type_ids": torch.tensor(
            [[0] * (width - len(row)) + row for row in types]
        ),
    }
    if not pixels:
        return inputs
    if gemma:
        return inputs | {"pixel_values": torch.stack(pixels)}
    return inputs | {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor(grids)}


def generate(model: PreTrainedModel, inputs: Inputs, **options: Any) -> DCutOutput:
    options = {"do_sample": False, "max_new_tokens": NEW, "return_dict_in_generate": True, **options}
    return model.generate(**inputs, **options)


def random_dflash(model: PreTrainedModel) -> DFlashDrafter:
    shape = {"taps": [0, 2], "mask_token_id": 3, "block_size": D + 1, "layers": 2, "dtype": model.dtype}
    return DFlashDrafter.random(model.config, **shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [ONE, THREE], ids=["one", "three"])
def test_greedy_text_is_that_of_plain_generate(
    models: dict[str, PreTrainedModel], knowing: Callable[..., Drafter], kind: str, rows: list[Row]
) -> None:
    model, inputs = models[kind], prompts(kind, rows)
    plain = generate(model, inputs, output_logits=True)
    other = generate(model, inputs | {"pixel_values": -inputs["pixel_values"]})
    assert not torch.equal(plain.sequences, other.sequences), "the images are seen"
    drafters = (random_dflash(model), knowing(inputs, plain.sequences, D), PromptLookupDrafter(D))
    for drafter, dcut in zip(drafters, (0.5, 1.0, 0.25), strict=True):
        output = generate(model, inputs, assistant_model=drafter, dcut=dcut, output_logits=True)
        assert torch.equal(output.sequences, plain.sequences)
        for ours, theirs in zip(output.logits, plain.logits, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)  # kept in float32
        assert output.stats is not None
        assert output.stats.prompt_tokens == inputs["attention_mask"].sum()
        assert output.stats.mean_accepted_tokens > (1.3 if dcut == 1.0 else 0.99), "an oracle helps"


@pytest.mark.parametrize("kind", KINDS)
def test_text_alone(models: dict[str, PreTrainedModel], kind: str) -> None:
    model, inputs = models[kind], prompts(kind, TEXTS)
    plain = generate(model, inputs)
    output = generate(model, inputs, assistant_model=random_dflash(model), dcut=0.5)
    assert torch.equal(output.sequences, plain.sequences)
    # No processor's token types: as for a language model.
    bare = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    assert torch.equal(generate(model, bare, prompt_lookup_num_tokens=D, dcut=0.5).sequences, plain.sequences)


def test_a_video(models: dict[str, PreTrainedModel], knowing: Callable[..., Drafter]) -> None:
    model = models["qwen2.5 vl"]
    ids = torch.tensor([[5, BEGIN, *[VIDEO] * 12, END, 7, 8]])
    chance = torch.Generator().manual_seed(3)
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": 2 * (ids == VIDEO).long(),
        "pixel_values_videos": torch.randn(48, 3 * 2 * 4 * 4, generator=chance, dtype=torch.float64),
        "video_grid_thw": torch.tensor([[3, 4, 4]]),
        "second_per_grid_ts": torch.tensor([1.0]),
    }
    plain = generate(model, inputs)
    output = generate(model, inputs, assistant_model=knowing(inputs, plain.sequences, D), dcut=0.5)
    assert torch.equal(output.sequences, plain.sequences)


@pytest.mark.parametrize("kind", KINDS)
def test_drafters_see_the_prompts_taps(
    models: dict[str, PreTrainedModel], stub_drafter: Callable[..., Any], kind: str
) -> None:
    model, inputs, seen = models[kind], prompts(kind, THREE), []
    drafter = stub_drafter(D, propose=lambda batch: pytest.fail("nothing to draft"), taps=(1, 0))
    drafter.observe = seen.append
    generate(model, inputs, assistant_model=drafter, dcut=1.0, max_new_tokens=1)
    committed: Committed = seen[0]
    stock = generate(model, inputs, max_new_tokens=1, output_hidden_states=True).hidden_states[0]
    lengths, width, first = inputs["attention_mask"].sum(1).tolist(), inputs["input_ids"].shape[1], 0
    for row, length in enumerate(lengths):
        own = slice(first, first + length)
        expected = torch.cat([stock[tap + 1][row, width - length :] for tap in (1, 0)], dim=-1)
        assert committed.taps is not None
        assert torch.allclose(committed.taps[own], expected, rtol=SLACK, atol=SLACK)
        assert committed.cell[own].tolist() == list(range(length))
        assert torch.equal(committed.token[own], inputs["input_ids"][row, width - length :])
        first += length
    assert first == len(committed.token)


def test_positions_behind_an_image_go_on_from_its_longer_side(models: dict[str, PreTrainedModel]) -> None:
    inputs = prompts("qwen3 vl", THREE)
    requests = prepare(models["qwen3 vl"], **inputs, max_new_tokens=2, do_sample=False)
    # 4 by 6 patches are 6 tokens and take 3 positions; 8 by 4 are 8 and take 4.
    assert [request.rope for request in requests] == [3 - 6, 0, 4 - 8]


def test_samples_depend_on_their_seed_alone(models: dict[str, PreTrainedModel]) -> None:
    model, inputs = models["qwen3 vl"], prompts("qwen3 vl", THREE[:2])
    options = {"do_sample": True, "temperature": 1.5, "num_return_sequences": 2, "seed": [3, 4, 5, 6]}
    plain = generate(model, inputs, dcut="none", **options)
    drafted = generate(model, inputs, assistant_model=random_dflash(model), dcut=0.5, **options)
    assert torch.equal(plain.sequences, drafted.sequences)
    assert len({tuple(row) for row in plain.sequences.tolist()}) == 4


def jobs(kind: str) -> Iterator[tuple[BatchRequest, Inputs]]:
    """Yields requests, and what `generate` takes for each: images with the same tokens, other images, and text."""
    for seed, rows in ((1, ONE), (2, ONE), (1, TEXTS[:1]), (3, THREE[2:]), (4, TEXTS[1:]), (4, ONE)):
        inputs = prompts(kind, rows, seed)
        if seed == 2:
            inputs["input_ids"] = prompts(kind, rows, 1)["input_ids"]
        media = {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
        yield BatchRequest(inputs["input_ids"][0].tolist(), media=media), inputs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [1, 2, 5])
def test_batch_jobs(models: dict[str, PreTrainedModel], kind: str, slots: int) -> None:
    model, given = models[kind], list(jobs(kind))
    options = {"max_new_tokens": 9, "do_sample": False}
    results = generate_batch(
        model,
        [request for request, _ in given],
        assistant_model=random_dflash(model),
        dcut=0.5,
        max_batch_size=slots,
        progress_bar=False,
        **options,
    )
    for (request, inputs), result in zip(given, results.values(), strict=True):
        alone = model.generate(**inputs, **options)[0, len(request.input_ids) :]
        assert result.generated_tokens == alone.tolist()


def test_requests_that_lose_their_slots_see_their_images_again(models: dict[str, PreTrainedModel]) -> None:
    model, inputs = models["qwen3 vl"], prompts("qwen3 vl", [*THREE, *ONE])
    plain = generate(model, inputs).sequences[:, inputs["input_ids"].shape[1] :]
    requests = prepare(model, **inputs, max_new_tokens=NEW, do_sample=False)
    longest = max(request.reach for request in requests)
    with open_engine(model, random_dflash(model), DCutConfig(budget=0.5), 4, 30, longest) as engine:
        for request in requests:
            engine.roster.add(request)
        # One leaves with a single token, two with more: these go on reading behind their prompts.
        for step in range(100):
            if step in (1, 4):
                for request in requests[: 1 if step == 1 else 3]:
                    engine.evict(request)
            if not engine.busy:
                break
            engine.step()
    assert [request.tokens for request in requests] == plain.tolist()
    assert engine.stats.evictions == 4


def test_a_prompt_that_ends_inside_an_image_is_refused(models: dict[str, PreTrainedModel]) -> None:
    inputs = prompts("qwen3 vl", [(3, (1, 4, 6), 0)])
    cut = {name: inputs[name][:, :-1] for name in ("input_ids", "attention_mask", "mm_token_type_ids")}
    with pytest.raises(ValueError, match=r"input_ids end inside an image.*end each prompt with text"):
        generate(models["qwen3 vl"], inputs | cut, prompt_lookup_num_tokens=D, dcut=0.5)


def test_positions_of_the_users_own_are_refused(models: dict[str, PreTrainedModel]) -> None:
    inputs = prompts("qwen3 vl", ONE)
    shape = inputs["input_ids"].shape
    inputs["position_ids"] = torch.arange(3, 3 + shape[1]).expand(3, *shape)
    with pytest.raises(ValueError, match="position_ids that do not count from 0"):
        generate(models["qwen3 vl"], inputs, prompt_lookup_num_tokens=D, dcut=0.5)


def test_media_of_a_batch_request_are_named(models: dict[str, PreTrainedModel]) -> None:
    request = BatchRequest([5, 6], media={"attention_mask": torch.ones(1, 2)})
    (result,) = generate_batch(
        models["gemma 3"], [request], dcut="none", max_new_tokens=2, progress_bar=False, raise_errors=False
    ).values()
    assert "media hold 'attention_mask': give what the processor returned besides" in str(result.error)


def test_token_types_of_a_language_model_are_refused() -> None:
    config = GPT2Config(vocab_size=101, n_embd=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    model, ids = AutoModelForCausalLM.from_config(config).eval(), torch.tensor([[5, 6, 7]])
    with pytest.raises(ValueError, match="token_type_ids does not work with dcut"):
        model.generate(ids, token_type_ids=torch.ones_like(ids), prompt_lookup_num_tokens=D, dcut=0.5)
