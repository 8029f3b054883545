"""What refilling slots is worth: answers of mixed length in static batches, and through `generate_batch`.

    python examples/full_batches.py

Every request may generate its own number of tokens, from 16 to 128. A static batch lasts until its longest answer is
done; `generate_batch` gives a finished request's slot to the next. Same drafter, same prompts, in turns; Transformers'
own continuous batching, which takes no drafter, runs beside them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
)

import hf_dcut
from hf_dcut.bench.peers import padded
from hf_dcut.bench.prompts import encode_each, read_prompts

LENGTHS = (16, 24, 32, 48, 64, 96, 128, 16)
Answers = list[list[int]]


class Job:
    """The same requests, answered in three ways.

    Args:
        model: the target.
        drafter: who proposes.
        prompts: token ids of each.
        slots: requests at once.
    """

    def __init__(self, model: PreTrainedModel, drafter: hf_dcut.Drafter, prompts: Answers, slots: int):
        self.model, self.drafter, self.prompts, self.slots = model, drafter, prompts, slots
        self.lengths = [LENGTHS[i % len(LENGTHS)] for i in range(len(prompts))]
        longest = max(map(len, prompts)) + max(LENGTHS)
        self.config = hf_dcut.DCutConfig(cost_table=hf_dcut.warmup(model, drafter, [1, 2, 4, 8, slots], True, longest))

    def static(self) -> Answers:
        """`generate(dcut=True)`, one batch of `slots` after the other."""
        answers = []
        for first in range(0, len(self.prompts), self.slots):
            batch = padded(self.prompts[first : first + self.slots], self.model.device)
            lengths = self.lengths[first : first + self.slots]
            rows = self.model.generate(
                **batch, assistant_model=self.drafter, dcut=self.config, do_sample=False, max_new_tokens=max(lengths)
            )
            new = rows[:, batch["input_ids"].shape[1] :].tolist()
            answers += [self._ended(row[:n]) for row, n in zip(new, lengths, strict=True)]
        return answers

    def refilled(self) -> Answers:
        """`hf_dcut.generate_batch`."""
        requests = [
            hf_dcut.BatchRequest(prompt, generation_config=self._options(n))
            for prompt, n in zip(self.prompts, self.lengths, strict=True)
        ]
        results = hf_dcut.generate_batch(
            self.model,
            requests,
            assistant_model=self.drafter,
            dcut=self.config,
            max_batch_size=self.slots,
            progress_bar=False,
        )
        return [result.generated_tokens for result in results.values()]

    def upstream(self) -> Answers:
        """Transformers' continuous batching."""
        pages = 2 * self.slots
        limits = ContinuousBatchingConfig(
            max_requests_per_batch=self.slots, num_blocks=pages, max_batch_tokens=max(2048, self.slots)
        )
        with self.model.continuous_batching_context_manager(
            generation_config=self._options(max(LENGTHS)), continuous_batching_config=limits, warmup=False
        ) as manager:
            names = [
                manager.add_request(prompt, max_new_tokens=n)
                for prompt, n in zip(self.prompts, self.lengths, strict=True)
            ]
            results = [manager.get_result() for _ in names]
        answers = {result.request_id: result.generated_tokens for result in results if result is not None}
        return [self._ended(answers[name]) for name in names]

    def _options(self, length: int) -> GenerationConfig:
        ends = {name: getattr(self.model.generation_config, name) for name in ("eos_token_id", "pad_token_id")}
        return GenerationConfig(max_new_tokens=length, do_sample=False, **ends)

    def _ended(self, tokens: list[int]) -> list[int]:
        end = self.model.generation_config.eos_token_id
        return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def main() -> None:
    """Measures, and prints the ratios of each round and their medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/smollm2-135m-instruct")
    parser.add_argument("--drafter", default="examples/drafter")
    parser.add_argument("--data", default="gsm8k")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.target)
    model = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.float32).eval()
    drafter = hf_dcut.AutoDrafter.from_pretrained(options.drafter)
    prompts = [list(ids) for ids in encode_each(tokenizer, read_prompts(options.data)[: options.requests])]
    job = Job(model, drafter, prompts, options.slots)
    methods: list[Callable[[], Answers]] = [job.static, job.refilled, job.upstream]
    speeds: dict[str, list[float]] = {method.__name__: [] for method in methods}
    for turn in range(options.rounds):
        said = {}
        for method in methods[turn % 3 :] + methods[: turn % 3]:
            begin = time.perf_counter()
            said[method.__name__] = method()
            tokens = sum(map(len, said[method.__name__]))
            speeds[method.__name__].append(tokens / (time.perf_counter() - begin))
            print(f"round {turn + 1}: {method.__name__:10} {speeds[method.__name__][-1]:7.1f} tokens/s", flush=True)
        equal = [sum(a == b for a, b in zip(said["static"], said[name], strict=True)) for name in said]
        print(
            f"round {turn + 1}: answers as in static batches: {dict(zip(said, equal, strict=True))} of {len(prompts)}"
        )
    for name in ("static", "upstream"):
        ratios = [a / b for a, b in zip(speeds["refilled"], speeds[name], strict=True)]
        print(f"refilled over {name}: {statistics.median(ratios):.2f} (of each round: {[round(r, 2) for r in ratios]})")


if __name__ == "__main__":
    main()
