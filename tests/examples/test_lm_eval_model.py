"""lm-evaluation-harness on the registered model: answers and scores of the harness's own `hf`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.extras

CONTEXTS = ["abc", "a longer context, abc", "x", "Question: 1+1?\nAnswer:", "0123456789" * 4]


@pytest.fixture(scope="module")
def example(load_example: Callable[[str], ModuleType]) -> ModuleType:
    pytest.importorskip("lm_eval")
    return load_example("lm_eval_model")


@pytest.fixture(scope="module")
def pair(example: ModuleType, tiny_folder: Path) -> tuple[Any, Any]:
    """The harness's model, one request at a time, and ours."""
    from lm_eval.models.huggingface import HFLM

    given = {"pretrained": str(tiny_folder), "dtype": "float64", "device": "cpu", "max_length": 96}
    return HFLM(**given, batch_size=1), example.DCutLM(**given, dcut=0.5, max_batch_size=3)


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, given, i) for i, given in enumerate(arguments)]


def test_answers_are_those_of_the_harness(pair: tuple[Any, Any]) -> None:
    plain, ours = pair
    options = [{"until": ["q", "\n"], "max_gen_toks": 30}, {"until": [], "do_sample": False, "max_gen_toks": 70}]
    asked = [(context, given) for context in CONTEXTS for given in options]
    answers = ours.generate_until(requests("generate_until", asked), disable_tqdm=True)
    assert answers == plain.generate_until(requests("generate_until", asked), disable_tqdm=True)
    assert len(set(answers)) > len(CONTEXTS)
    assert not any("q" in answer for answer in answers[::2])


def test_sampling_goes_through(pair: tuple[Any, Any]) -> None:
    asked = [
        (context, {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "max_gen_toks": 9}) for context in CONTEXTS
    ]
    assert all(pair[1].generate_until(requests("generate_until", asked), disable_tqdm=True))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"no_such_option": 1, "max_gen_toks": 5}, "no_such_option"),
        ({"num_beams": 2, "max_gen_toks": 5}, "num_beams"),
        ({"max_gen_toks": 96}, "max_gen_toks=96 leaves no room"),
    ],
)
def test_what_cannot_be_done_is_named(pair: tuple[Any, Any], options: dict[str, Any], reason: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=reason):
        pair[1].generate_until(requests("generate_until", [("a", options)]), disable_tqdm=True)


def test_scores_of_given_texts_are_inherited(pair: tuple[Any, Any]) -> None:
    asked = requests("loglikelihood", [("abc", " de"), ("x", "yz")])
    assert pair[1].loglikelihood(asked, disable_tqdm=True) == pair[0].loglikelihood(asked, disable_tqdm=True)


def test_a_task_from_end_to_end(example: ModuleType, tiny_folder: Path, pair: tuple[Any, Any], tmp_path: Path) -> None:
    from lm_eval import simple_evaluate

    asked = [("ab", {"until": ["\n"], "max_gen_toks": 6}), ("xyz", {"until": ["\n"], "max_gen_toks": 6})]
    said = pair[0].generate_until(requests("generate_until", asked), disable_tqdm=True)
    documents = [{"question": "ab", "answer": said[0]}, {"question": "xyz", "answer": "something else"}]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    task = {
        "task": "tiny",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "test.jsonl")}, "cache_dir": str(tmp_path)},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    results = simple_evaluate(
        "hf-dcut",
        model_args={"pretrained": str(tiny_folder), "dtype": "float64", "dcut": 0.5, "device": "cpu"},
        tasks=[task],
        bootstrap_iters=0,
    )
    assert results["results"]["tiny"]["exact_match,none"] == 0.5
