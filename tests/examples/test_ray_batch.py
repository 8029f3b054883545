"""A file answered by an actor of Ray Data, stopped half way and gone on with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

cluster = pytest.importorskip("ray")
# Ray opens files and sockets that it leaves to the end of the process, and warns of what will change in itself.
pytestmark = [pytest.mark.extras, pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]

PROMPTS = {"a": "abcabcab", "b": "a longer prompt, abc", "3": "x", "d": "One, two, one, two,", "e": "yes no yes no"}


@pytest.fixture(scope="module")
def example(load_example: Callable[[str], ModuleType], monkeypatch_module: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch_module.setenv("RAY_USAGE_STATS_ENABLED", "0")
    # Actors hold the example's class by value, since the test's process alone knows the module.
    cluster.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield load_example("ray_batch")
    cluster.shutdown()


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def read(folder: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for file in folder.glob("*.json") for line in file.read_text().splitlines()]
    assert len({line["id"] for line in lines}) == len(lines), "a line has two answers"
    return {line["id"]: line for line in lines}


def test_a_job_that_was_stopped_goes_on(example: ModuleType, tiny_folder: Path, tmp_path: Path) -> None:
    source, folder = tmp_path / "prompts.jsonl", tmp_path / "answers"
    source.write_text("".join(json.dumps({"id": k, "prompt": v}) + "\n" for k, v in PROMPTS.items()))
    replica = {"target": str(tiny_folder), "drafter": "lookup"}
    replica["options"] = {"dcut": 0.5, "max_batch_size": 2, "max_new_tokens": 8, "do_sample": True}

    assert example.answer(source, folder, replicas=1, gpus=0, lines=2, **replica) == 5
    whole = read(folder)
    assert whole.keys() == PROMPTS.keys()
    assert all(line["text"] and line["error"] == "" for line in whole.values())
    files = sorted(folder.glob("*.json"))
    assert len(files) > 1

    files[0].unlink()
    missing = whole.keys() - read(folder).keys()
    assert 0 < len(missing) < 5
    assert example.answer(source, folder, replicas=1, gpus=0, lines=2, **replica) == len(missing)
    assert read(folder) == whole
    assert example.answer(source, folder, replicas=1, gpus=0, lines=2, **replica) == 0


def test_a_line_that_fails_has_its_error(example: ModuleType, tiny_folder: Path) -> None:
    answerer = example.Answerer(str(tiny_folder), "lookup", {"dcut": 0.5, "max_new_tokens": 4, "do_sample": False})
    rows = answerer({"id": ["empty", "good"], "prompt": ["", "abc"]})
    assert rows["finish_reason"] == ["error", "length"]
    assert "input_ids are empty" in rows["error"][0]


def test_a_file_that_was_cut_off(example: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "part.json"
    file.write_text('{"id": 7, "text": "a"}\n{"id": "8", "te')
    with pytest.raises(ValueError, match=r"part\.json:2 is no JSON object with an id .*can be deleted"):
        example.answered(tmp_path)
    file.write_text('{"id": 7, "text": "a"}\n')
    assert example.answered(tmp_path) == {"7"}
