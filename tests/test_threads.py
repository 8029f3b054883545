"""Calls with and without dcut, with different options, at once on one model: each is as if it were alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_dcut import BatchStreamer, DCutConfig, Piece
from hf_dcut.drafters import DFlashDrafter

NEW, TIMES = 24, 4


def test_two_calls_with_dcut_and_one_without(
    tiny_llama: Callable[..., PreTrainedModel], make_prompts: Callable[..., dict[str, torch.Tensor]]
) -> None:
    model = tiny_llama(eos_token_id=[40, 77])
    shape = {"taps": [0, 2], "mask_token_id": 3, "block_size": 5, "layers": 1, "dtype": torch.float64}
    drafter = DFlashDrafter.random(model.config, **shape)
    greedy, sampled = {"do_sample": False, "max_new_tokens": NEW}, {"do_sample": True, "max_new_tokens": NEW, "seed": 3}
    jobs: list[tuple[dict[str, torch.Tensor], dict[str, Any]]] = [
        (make_prompts(5), {**greedy, "no_repeat_ngram_size": 2, "assistant_model": drafter, "dcut": 0.5}),
        (make_prompts(3, 1), {**sampled, "assistant_model": drafter, "dcut": DCutConfig(0.5, proposals="sampled")}),
        (make_prompts(4, 2), {**greedy, "repetition_penalty": 1.3}),
    ]
    alone = [model.generate(**inputs, **options) for inputs, options in jobs]
    together = Barrier(len(jobs))

    def run(job: int) -> list[tuple[torch.Tensor, list[Piece]]]:
        inputs, options = jobs[job]
        together.wait(timeout=60)
        results = []
        for _ in range(TIMES):
            pieces: list[Piece] = []
            streamer = {"streamer": BatchStreamer(callback=pieces.append)} if "dcut" in options else {}
            results.append((model.generate(**inputs, **options, **streamer), pieces))
        return results

    with ThreadPoolExecutor(len(jobs)) as threads:
        outcomes = list(threads.map(run, range(len(jobs))))
    for expected, results in zip(alone, outcomes, strict=True):
        for tokens, pieces in results:
            assert torch.equal(tokens, expected)
            for row, text in enumerate(expected[:, -NEW:].tolist() if pieces else []):
                said = [token for piece in pieces if piece.request == row for token in piece.tokens]
                assert text == said + [0] * (NEW - len(said))
    assert not any(module._forward_hooks for module in model.modules())
