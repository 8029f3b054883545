"""Runs a batch manager for minutes on end, with requests that come, go, are cancelled, fail and are evicted.

    python tests/soak/soak.py --minutes 30

A tiny random model with two drafters in turn, both budgets, greedy and sampled requests. Every text that ends by itself
is compared with the one its request got the first time, and the memory of tensors and of the process must stay flat
after the first quarter. Exit code 1 says that something was lost, changed or grew.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Callable

import psutil
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

from hf_dcut import BatchManager, BatchResult, Drafter, PromptLookupDrafter
from hf_dcut.drafters import DFlashDrafter

VOCABULARY, LONGEST = 101, 96
# Bytes that the process may grow by after the first quarter: allocators keep some of what they were given back.
_SLACK = 32 * 2**20


class Poison(LogitsProcessor):
    """Raises at a token of the request."""

    def __init__(self, left: int):
        self.left = left

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            raise LookupError("poison")
        return scores


def tiny_model() -> LlamaForCausalLM:
    """Returns a random model of one layer in float64, where texts do not depend on the batch."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        initializer_range=0.2,
        tie_word_embeddings=False,
        eos_token_id=40,
        pad_token_id=0,
        **sizes,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).double().eval()


def drafters(model: LlamaForCausalLM) -> list[Drafter]:
    """Returns one that copies and one that guesses."""
    block = {"taps": [0], "mask_token_id": 3, "block_size": 4, "layers": 1, "dtype": torch.float64}
    return [PromptLookupDrafter(3), DFlashDrafter.random(model.config, **block)]


def kinds() -> list[tuple[list[int], GenerationConfig]]:
    """Returns the requests that come again and again."""
    chance = random.Random(1)
    options = ({"do_sample": False}, {"do_sample": False, "no_repeat_ngram_size": 2}, {"do_sample": True, "top_k": 0})
    return [
        (
            [chance.randrange(3, 30) for _ in range(chance.randrange(1, 40))],
            GenerationConfig(max_new_tokens=chance.randrange(1, 50), **options[n % 3]),
        )
        for n in range(40)
    ]


class Soak:
    """Feeds managers and checks what they give.

    Args:
        until: when it ends, by `time.perf_counter`.
    """

    def __init__(self, until: float):
        self.until, self.chance = until, random.Random(0)
        self.model, self.kinds = tiny_model(), kinds()
        self.texts: dict[int, list[int]] = {}
        self.ended = dict.fromkeys(("eos", "length", "cancelled", "error"), 0)

    def round(self, drafter: Drafter, budget: float, requests: int) -> int:
        """Returns the evictions of one manager that was given so many requests."""
        kind_of: dict[str, int] = {}
        arguments = {"assistant_model": drafter, "dcut": {"budget": budget, "max_prefill_tokens": 48}}
        with BatchManager(self.model, max_batch_size=8, max_length=LONGEST, max_queue=16, **arguments) as manager:
            evicting = _evicting(manager, self.chance)
            for _ in range(requests):
                kind, poison = self.chance.randrange(len(self.kinds)), self.chance.random() < 0.05
                prompt, config = self.kinds[kind]
                processors = LogitsProcessorList([Poison(2)]) if poison else None
                fields = {"generation_config": config, "seed": 5, "priority": self.chance.randrange(3)}
                name = manager.add_request(prompt, logits_processor=processors, **fields)
                kind_of[name] = -1 if poison else kind
                if self.chance.random() < 0.1:
                    manager.cancel_request(name)
                evicting()
            manager.stop(block=False)
            for result in manager:
                self.check(result, kind_of.pop(result.request_id))
            assert not kind_of, f"{len(kind_of)} requests were lost"
        return manager.stats.evictions

    def check(self, result: BatchResult, kind: int) -> None:
        """Compares a text with the one that its kind of request got the first time."""
        assert result.finish_reason is not None
        self.ended[result.finish_reason] += 1
        if result.finish_reason in ("eos", "length") and kind >= 0:
            assert self.texts.setdefault(kind, result.generated_tokens) == result.generated_tokens, "a text changed"
        else:
            assert result.finish_reason != "error" or kind < 0, result.error


def _evicting(manager: BatchManager, chance: random.Random) -> Callable[[], None]:
    """Returns a function after which, now and then, a live request loses its slot before the next step."""
    exchange, due = manager._exchange, [False]

    def evicts(engine: object) -> bool:
        goes_on = exchange(engine)  # type: ignore[arg-type]
        live = engine.roster.live  # type: ignore[attr-defined]
        if due[0] and live:
            engine.evict(chance.choice(live))  # type: ignore[attr-defined]
            due[0] = False
        return goes_on

    manager._exchange = evicts  # type: ignore[method-assign, assignment]
    return lambda: due.__setitem__(0, chance.random() < 0.2)


def memory() -> tuple[int, int]:
    """Returns the bytes in tensors that are alive, and those of the process."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors), psutil.Process().memory_info().rss


def main() -> int:
    """Returns the exit code: 0 if everything held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--requests", type=int, default=200, help="of one manager")
    options = parser.parse_args()
    begin = time.perf_counter()
    soak, rounds, evictions = Soak(begin + 60 * options.minutes), 0, 0
    pairs, early = drafters(soak.model), None
    while time.perf_counter() < soak.until or early is None:
        evictions += soak.round(pairs[rounds % 2], (0.5, 1.0)[rounds // 2 % 2], options.requests)
        rounds += 1
        if early is None and rounds >= 4 and time.perf_counter() - begin > 15 * options.minutes:
            early = memory()
    late = memory()
    print(f"{rounds} managers, ended: {soak.ended}, evictions: {evictions}")
    for what, before, after in zip(("tensors", "process"), early, late, strict=True):
        print(f"{what}: {before / 2**20:.2f} MiB after a quarter, {after / 2**20:.2f} MiB at the end")
    if late[0] > early[0] or late[1] > early[1] + _SLACK:
        print("memory grew")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
