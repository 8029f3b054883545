"""The loop: it learns, it goes on after a kill, and processes add up to one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_dcut.drafters.training import Recipe, Trainer

RECIPE = {"batch": 4, "anchors": 6, "learning_rate": 3e-3, "precision": "no", "save_every": 2}


@pytest.fixture
def make_trainer(make_world: Callable[..., Any], tmp_path: Path) -> Callable[..., Trainer]:
    """`make_trainer(folder="run", dtype=torch.float64, held_out=0, seed of the weights, **recipe)`."""

    def build(folder: str = "run", dtype: torch.dtype = torch.float64, held_out: int = 0, **recipe: Any) -> Trainer:
        world = make_world(dtype)
        # Read once: what a step must not depend on is the time it is asked.
        taps = {answer: world.taps(answer) for answer in world.answers}
        model = world.drafter(draft_ids=list(range(2, 100))).model
        held = world.answers[:held_out]
        numbers = Recipe(**({"steps": 4} | RECIPE | recipe))
        return Trainer(model, world.target, world.answers, held, taps.__getitem__, numbers, tmp_path / folder)

    return build


def metrics(trainer: Trainer) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (trainer.folder / "metrics.jsonl").read_text().splitlines()]


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def test_two_steps_lower_the_loss(make_trainer) -> None:
    # One batch an epoch, so that both steps and the evaluation see the same anchors.
    trainer = make_trainer(steps=3, batch=6, anchors=30, warmup=0.0)
    trainer.run()
    losses = [line["loss"] for line in metrics(trainer)]
    assert losses[2] < losses[0] - 0.1


def test_it_learns_what_the_target_says(make_trainer) -> None:
    trainer = make_trainer(steps=60, batch=6, anchors=30, held_out=6, evaluate_every=30)
    assert trainer.held_out_tokens()["tokens"] < 1.2
    trainer.run()
    # Six answers by heart: it can be done only if every block sees its context.
    assert trainer.held_out_tokens()["tokens"] > 3
    assert [line["step"] for line in metrics(trainer) if "held_out" in line] == [30, 60]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_resumed_run_equals_an_unbroken_one(make_trainer, dtype) -> None:
    unbroken = make_trainer("unbroken", dtype)
    unbroken.run()
    # Killed in step 4, after the state of step 2 was written.
    killed = make_trainer("killed", dtype)
    original = killed._train_step

    def step_or_die(*arguments: Any) -> dict[str, float]:
        if killed.step == 3:
            raise KeyboardInterrupt
        return original(*arguments)

    killed._train_step = step_or_die
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    resumed = make_trainer("killed", dtype)
    resumed.resume()
    assert resumed.step == 2
    resumed.run()
    for name, tensor in weights(unbroken).items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


def test_a_run_that_is_over_does_nothing_more(make_trainer) -> None:
    trainer = make_trainer()
    trainer.run()
    before = weights(trainer)
    again = make_trainer()
    again.resume()
    again.run()
    assert len(metrics(trainer)) == 4
    assert all(torch.equal(tensor, again.model.state_dict()[name]) for name, tensor in before.items())


def test_nothing_to_resume(make_trainer) -> None:
    with pytest.raises(FileNotFoundError, match="there is no run to resume"):
        make_trainer().resume()


def test_a_state_of_another_drafter_is_refused(make_trainer, make_world) -> None:
    make_trainer().save()
    other = make_trainer()
    other.model.layers.append(other.model.layers[0])
    with pytest.raises(ValueError, match="state of another drafter"):
        other.resume()


def test_a_time_budget_ends_training(make_trainer) -> None:
    trainer = make_trainer(steps=None)
    trainer.run(seconds=1.0)
    lines = metrics(trainer)
    assert trainer.step == len(lines) > 1
    assert lines[-1]["rate"] < 0.6 * max(line["rate"] for line in lines)
    assert (trainer.folder / "state.pt").is_file()


def test_an_end_must_be_given(make_trainer) -> None:
    with pytest.raises(ValueError, match="training never ends"):
        make_trainer(steps=None).run()


def test_too_few_answers_for_a_batch(make_trainer) -> None:
    with pytest.raises(ValueError, match="batch=500: the answers have fewer rows"):
        make_trainer(batch=500).run()


def test_bfloat16_products_leave_float32_weights(make_trainer) -> None:
    trainer = make_trainer(dtype=torch.float32, precision="bf16", held_out=2)
    trainer.held_out_tokens()
    trainer.run()
    assert {tensor.dtype for tensor in trainer.model.parameters()} == {torch.float32}
    assert trainer.model.fc.weight.grad is None


# Two processes, each with half of the rows of a step, against one with all of them.
SCRIPT = """
import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_dcut.drafters.dflash import DFlashDrafter
from hf_dcut.drafters.training import Answer, Recipe, Trainer

torch.manual_seed(0)
config = LlamaConfig(vocab_size=101, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4)
target = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval().requires_grad_(False)
answers = [Answer(tuple((7 * i + 3 * j * j) % 101 for j in range(9 + i)), 2) for i in range(9)]
generator = torch.Generator().manual_seed(0)
taps = {a: torch.randn(len(a), 128, generator=generator, dtype=torch.float64) for a in answers}
options = {"taps": (0, 2), "mask_token_id": 3, "block_size": 5, "layers": 2, "dtype": torch.float64}
model = DFlashDrafter.random(config, **options).model
recipe = Recipe(steps=2, batch=4, anchors=3, learning_rate=1e-3, precision="no")
trainer = Trainer(model, target, answers, [], taps.__getitem__, recipe, sys.argv[1])
trainer.run()
assert trainer.accelerator.num_processes == int(sys.argv[2])
"""


def launch(script: Path, folder: Path, processes: int) -> dict[str, Tensor]:
    """Returns the weights after two steps in so many processes."""
    command = [sys.executable, "-P"]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run([*command, script, folder, str(processes)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "state.pt", weights_only=True)["model"]


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    one, two = (launch(script, tmp_path / str(n), n) for n in (1, 2))
    for name, tensor in one.items():
        # Sums over rows come in another order.
        assert torch.allclose(tensor, two[name], rtol=0, atol=1e-9), name
