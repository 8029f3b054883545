"""GRPO on a tiny policy: rollouts come from the batch loop, and follow the weights as they change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_dcut

# The warning is about what TRL itself uses.
pytestmark = [pytest.mark.extras, pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")]


@pytest.fixture(scope="module")
def trl() -> Any:
    return pytest.importorskip("trl")


@pytest.fixture
def train(trl: Any, tiny_folder: Path, tmp_path: Path) -> Callable[..., Any]:
    """`train(prepare=None, **config)`: a trainer after three steps."""
    from datasets import Dataset

    def run(
        prepare: Callable[[Any], None] = lambda model: None, dtype: torch.dtype = torch.float32, **config: Any
    ) -> Any:
        model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=dtype)
        prepare(model)
        given = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 12, "max_steps": 3}
        trainer = trl.GRPOTrainer(
            model,
            lambda completions, **columns: [float(len(set(text))) for text in completions],
            trl.GRPOConfig(str(tmp_path), **given, **config, learning_rate=1e-2, use_cpu=True, report_to="none"),
            train_dataset=Dataset.from_dict({"prompt": ["abc", "a longer prompt", "x"] * 4}),
            processing_class=AutoTokenizer.from_pretrained(tiny_folder),
        )
        trainer.train()
        return trainer

    return run


def test_rollouts_come_from_the_batch_loop(
    train: Callable[..., Any], load_example: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, seen = hf_dcut.generate_batch, []

    def watched(model: Any, inputs: Any, config: Any, **arguments: Any) -> Any:
        greedy = original(model, [[5, 6, 7]], max_new_tokens=12, do_sample=False, progress_bar=False, dcut="none")
        ids = torch.tensor([[5, 6, 7]])
        plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        results = original(model, inputs, config, **arguments)
        seen.append((greedy["req_0"].generated_tokens, plain[0, 3:].tolist(), list(inputs), results))
        return results

    monkeypatch.setattr(hf_dcut, "generate_batch", watched)
    example = load_example("trl_rollouts")
    trainer = train(
        lambda model: example.draft_rollouts(model, hf_dcut.PromptLookupDrafter(), dcut=0.5, max_batch_size=3),
        use_transformers_continuous_batching=True,
    )
    assert trainer.state.global_step == len(seen) == 3
    for greedy, plain, inputs, results in seen:
        assert greedy == plain
        assert [result.prompt_ids for result in results.values()] == inputs
        assert len(inputs) == 4
        assert all(1 <= len(result.generated_tokens) <= 12 for result in results.values())
        assert len({tuple(result.generated_tokens) for result in results.values()}) > 1
    assert seen[0][0] != seen[-1][0], "the weights changed, and so did the text"


@pytest.mark.parametrize(("dtype", "mixed"), [(torch.float32, False), (torch.bfloat16, True)])
def test_prompt_lookup_needs_no_code(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, mixed: bool
) -> None:
    calls: list[Any] = []
    original = hf_dcut.generation.generate
    monkeypatch.setattr(hf_dcut.generation, "generate", lambda *a, **k: calls.append(k["dcut"]) or original(*a, **k))
    options = {"dcut": 0.5, "prompt_lookup_num_tokens": 4}
    assert train(dtype=dtype, bf16=mixed, generation_kwargs=options).state.global_step == 3
    assert calls == [0.5] * 3
