"""`train` from prompts to a drafter, on a tiny target with a real tokenizer."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_dcut.bench import evaluate
from hf_dcut.cli import main
from hf_dcut.drafters import AutoDrafter
from hf_dcut.drafters.dflash import DFlashDrafter
from hf_dcut.drafters.training import Recipe, Trainer, read_answers
from hf_dcut.drafters.training.calibrate import MULTIPLIERS
from hf_dcut.training import TrainPlan, train

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = ["What is two and two?", "Name a colour.", "Say hello to a friend.", "How long is a day?", "Why?"]
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 9, "head_dim": 8}


@pytest.fixture(scope="module")
def target(
    smollm2: Path, make_target: Callable[..., PreTrainedModel], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of a random model of nine layers with SmolLM2's vocabulary."""
    folder = tmp_path_factory.mktemp("target")
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = make_target("llama", dtype=torch.float32, vocab_size=len(tokenizer), **SMALL)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": q}) + "\n" for q in QUESTIONS))
    return path


def plan(target: Path, prompts: Path | None, out: Path, steps: int | None = 3, **options: object) -> TrainPlan:
    recipe = Recipe(steps=steps, batch=2, anchors=4, precision="no", evaluate_every=2, save_every=1)
    numbers = {"layers": 1, "block_size": 4, "max_new_tokens": 12, "held_out": 0.25, "keep_loops": True}
    return TrainPlan(str(target), out, None if prompts is None else str(prompts), recipe=recipe, **(numbers | options))


def test_from_prompts_to_a_drafter(target: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "drafter"
    result = train(plan(target, prompts, out, draft_vocab_size=20, command="hf-dcut train --out drafter"))
    assert result["steps"] == 3
    assert result["tokens_per_step"] >= 1
    drafter = AutoDrafter.from_pretrained(out)
    drafter.check(AutoModelForCausalLM.from_pretrained(target))
    assert isinstance(drafter, DFlashDrafter)
    assert drafter.taps == (1, 2, 4, 5, 6)
    assert drafter.config.draft_vocab_size == 20
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: hf-dcut\n")
    assert "    hf-dcut train --out drafter" in card
    assert f"{result['tokens_per_step']:.2f} tokens a step" in card
    answers = read_answers(out / "work" / "answers-0.jsonl")
    assert len(answers) == len(QUESTIONS)
    lines = [json.loads(line) for line in (out / "work" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]
    assert any("held_out" in line for line in lines)


def test_probabilities_are_learned_too(target: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "drafter"
    settings = plan(target, prompts, out)
    train(replace(settings, recipe=replace(settings.recipe, soft=0.5)))
    config = json.loads((out / "config.json").read_text())
    # Confidences are fitted to the answers that were held out.
    fitted = config["dflash_config"]["output_multiplier"]
    assert fitted in MULTIPLIERS
    meta = json.loads((out / "work" / "taps" / "0" / "meta.json").read_text())
    assert meta["final"]
    # Going on from it with shorter blocks fits them anew.
    again = train(plan(target, prompts, tmp_path / "shorter", layers=None, block_size=3, start=str(out)))
    assert again["steps"] == 3
    assert AutoDrafter.from_pretrained(tmp_path / "shorter").draft_tokens == 2


def test_a_run_goes_on(target: Path, prompts: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(plan(target, prompts, whole))
    recipe = plan(target, prompts, parts).recipe
    # The first part is killed after two steps of the same schedule.
    original = Trainer._train_step

    def die(self: Trainer, *arguments: Any) -> dict[str, float]:
        if self.step == 2:
            raise KeyboardInterrupt
        return original(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_train_step", die)
        with pytest.raises(KeyboardInterrupt):
            train(plan(target, prompts, parts))
    with pytest.raises(ValueError, match="holds a run already"):
        train(plan(target, prompts, parts))
    result = train(plan(target, prompts, parts, resume=True))
    assert result["steps"] == recipe.steps
    assert (whole / "model.safetensors").read_bytes() == (parts / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_two_processes_share_the_work(target: Path, prompts: Path, tmp_path: Path) -> None:
    out, one = tmp_path / "out", tmp_path / "one"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "hf_dcut.cli"]
    options = ["--layers", "1", "--block-size", "4", "--max-new-tokens", "12", "--held-out", "0.25", "--keep-loops"]
    numbers = ["--steps", "2", "--batch", "2", "--anchors", "4", "--precision", "no"]
    files = ["--target", target, "--prompts", prompts, "--out", out]
    command = [sys.executable, "-P", *launch, "train", *files, *options, *numbers]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [len(read_answers(out / "work" / f"answers-{rank}.jsonl")) for rank in (0, 1)] == [3, 2]
    assert all((out / "work" / "taps" / rank / "taps.bin").stat().st_size for rank in "01")
    assert "2 steps in" in done.stdout
    # One process that is given the answers in the same order ends with the same weights.
    answers = tuple(out / "work" / f"answers-{rank}.jsonl" for rank in (0, 1))
    train(plan(target, None, one, steps=2, answers=answers))
    ours, theirs = (AutoDrafter.from_pretrained(folder).model.state_dict() for folder in (one, out))
    assert all(torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-4) for name in ours)


def test_answers_that_were_given_need_no_prompts(target: Path, prompts: Path, tmp_path: Path) -> None:
    train(plan(target, prompts, tmp_path / "first"))
    answers = tmp_path / "first" / "work" / "answers-0.jsonl"
    again = tmp_path / "again"
    kept = {"layers": None, "block_size": None, "start": str(tmp_path / "first")}
    result = train(plan(target, None, again, answers=(answers,), steps=1, **kept))
    assert result["steps"] == 1
    assert AutoDrafter.from_pretrained(again).draft_tokens == 3
    assert not (again / "work" / "answers-0.jsonl").exists()
    with pytest.raises(ValueError, match="nothing to train on"):
        plan(target, None, tmp_path)
    with pytest.raises(ValueError, match="keeps the shape of that drafter: leave out layers, or"):
        plan(target, None, again, answers=(answers,), start=str(again))
    with pytest.raises(ValueError, match="needs a time_budget"):
        plan(target, prompts, again, steps=None)


def test_a_time_budget_ends_everything(target: Path, prompts: Path, tmp_path: Path) -> None:
    recipe = Recipe(steps=None, batch=2, anchors=4, precision="no")
    settings = {"layers": 1, "block_size": 4, "max_new_tokens": 12, "keep_loops": True, "held_out": 0.0}
    out = tmp_path / "out"
    result = train(TrainPlan(str(target), out, str(prompts), recipe=recipe, time_budget=20.0, **settings))
    assert result["steps"] > 1
    assert result["seconds"] < 40
    assert result["tokens_per_step"] is None
    assert "no answers were held out" in (out / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="asks make for its recipe")
def test_the_recipe_for_a_gpu_runs_in_small(target: Path, prompts: Path, tmp_path: Path) -> None:
    """`make train-gpu` as it stands, but for the models, the minutes and how much is done at once."""
    recipe = ["make", "--no-print-directory", "-n", "train-gpu", "SETUP=", "HF_DCUT=hf-dcut", f"PROMPTS={prompts}"]
    told = subprocess.run(recipe, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    name, *arguments = shlex.split(told.replace("\\\n", " "))
    assert name == "hf-dcut"
    config = AutoModelForCausalLM.from_pretrained(target).config
    start, out = tmp_path / "start", tmp_path / "out"
    DFlashDrafter.random(config, taps=(1, 4), mask_token_id=3, block_size=4, layers=1).save_pretrained(start)
    small = {"--target": target, "--start": start, "--out": out, "--time-budget": "20s"}
    small |= {"--slots": 4, "--batch": 2, "--anchors": 4}
    for option, value in small.items():
        arguments[arguments.index(option) + 1] = str(value)
    assert main([*arguments, "--max-new-tokens", "12", "--keep-loops", "--held-out", "0.25"]) == 0
    assert AutoDrafter.from_pretrained(out).dtype == torch.bfloat16
    assert len(read_answers(out / "work" / "answers-0.jsonl")) == len(QUESTIONS)
    steps = [json.loads(line) for line in (out / "work" / "metrics.jsonl").read_text().splitlines()]
    assert max(line["step"] for line in steps) > 1


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "line 2 is not JSON"), ('{"question": "?"}', "line 2 has no text under 'prompt'")],
)
def test_a_bad_line_of_the_prompts(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"prompt": "Why?"}) + "\n" + line + "\n")
    command = ["train", "--target", str(target), "--prompts", str(path), "--out", str(tmp_path / "out")]
    assert main(command) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "steps=0"),
        (["--held-out", "1"], "held_out=1.0"),
        (["--taps", "1,99"], "taps=[1, 99]: give one or more layers of the target, 0 to 8"),
        (["--answers", "/no/such/file"], "/no/such/file"),
        (["--start", "target", "--layers", "99", "--steps", "1"], "the target has 9 layers to copy"),
        (["--draft-vocab-size", "99999999"], "draft_vocab_size=99999999"),
        (["--resume", "--work", "/dev/null/x"], "/dev/null/x"),
    ],
)
def test_bad_options_end_with_status_2(
    target: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    command = ["train", "--target", str(target), "--prompts", str(prompts), "--out", str(tmp_path / "out")]
    assert main([*command, "--max-new-tokens", "4", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "m", "0s", "-3m", "eight", "nan", "inf"])
def test_a_time_that_is_none(text: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train", "--target", "x", "--out", "y", "--time-budget", text])
    assert stop.value.code == 2


def test_evaluate_compares_drafters(
    target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = AutoModelForCausalLM.from_pretrained(target).config
    drafter = DFlashDrafter.random(config, taps=(1, 4), mask_token_id=3, block_size=4, layers=1)
    drafter.save_pretrained(tmp_path / "random")
    out = tmp_path / "numbers.json"
    command = ["evaluate", "--target", str(target), "--drafter", str(tmp_path / "random"), "--data", str(prompts)]
    rest = ["--max-new-tokens", "12", "--prompts", "4", "--answers", str(tmp_path / "answers"), "--out", str(out)]
    assert main([*command, *rest, "--keep-loops"]) == 0
    text = capsys.readouterr().out
    assert "tokens a step" in text
    assert "| prompts | prompt lookup | 4 |" in text
    rows = json.loads(out.read_text())["results"]
    assert {row["drafter"] for row in rows} == {str(tmp_path / "random"), "prompt lookup"}
    assert all(row["tokens_per_step"] >= 1 for row in rows)
    assert len(read_answers(tmp_path / "answers" / "prompts-12.jsonl")) == 4
    # The second time nothing is generated.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_dcut.regeneration.open_engine", None)
        assert main([*command, *rest]) == 0


def test_evaluate_refuses_what_it_cannot_do(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--target", str(target), "--drafter", "/no/drafter"]) == 2
    assert "/no/drafter" in capsys.readouterr().err
    assert main(["evaluate", "--prompts", "0"]) == 2
    assert "--prompts 0: give a positive integer" in capsys.readouterr().err
    assert evaluate.report([]).count("\n") == 1
