"""GRPO with TRL: rollouts drafted and verified by hf-dcut. Needs `pip install hf-dcut[frameworks]`; `make setup` first.

TRL's trainer, with `use_transformers_continuous_batching=True`, hands all prompts of a step to `model.generate_batch`.
`draft_rollouts` puts hf-dcut's there, which keeps the batch full while short rollouts end. The target's weights are
read at every step as they are then. The drafter stays as it was, so it agrees with the policy less and less: rollouts
get slower, never different in law.

Without a drafter of its own, a model can draft from its own text with no code at all:
`GRPOConfig(..., generation_kwargs={"dcut": True, "prompt_lookup_num_tokens": 8})`. That goes through `generate`, which
under mixed precision wants weights in bfloat16: load the policy so, or set `bf16=False`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

import hf_dcut


def draft_rollouts(model: PreTrainedModel, drafter: hf_dcut.Drafter, **arguments: Any) -> None:
    """Makes the model's `generate_batch`, on this object alone, hf-dcut's.

    Args:
        model: the policy; with PEFT, the wrapped model that the trainer gets.
        drafter: who proposes.
        arguments: others of `hf_dcut.generate_batch`, such as `dcut` and `max_batch_size`.
    """
    model.generate_batch = partial(_rollouts, model, assistant_model=drafter, **arguments)


def _rollouts(
    model: PreTrainedModel,
    inputs: Sequence[Sequence[int]],
    generation_config: GenerationConfig,
    continuous_batching_config: object,
    progress_bar: bool,
    **arguments: Any,
) -> dict[str, hf_dcut.BatchResult]:
    """Returns one result a prompt. What concerns Transformers' paged cache has no place here and is left out."""
    return hf_dcut.generate_batch(model, inputs, generation_config, progress_bar=progress_bar, **arguments)


if __name__ == "__main__":
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    model = AutoModelForCausalLM.from_pretrained("models/smollm2-135m-instruct", dtype="float32")
    draft_rollouts(model, hf_dcut.AutoDrafter.from_pretrained("examples/drafter"))
    prompts = Dataset.from_dict({"prompt": ["Count to ten.", "Name three primes.", "What is 12 times 7?"] * 4})
    config = GRPOConfig(
        output_dir="build/grpo",
        use_transformers_continuous_batching=True,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=32,
        max_steps=3,
        use_cpu=True,
        report_to="none",
    )

    def shortness(completions: list[str], **columns: Any) -> list[float]:
        """Returns a reward for short answers."""
        return [-float(len(text)) for text in completions]

    GRPOTrainer(model, shortness, config, train_dataset=prompts).train()
