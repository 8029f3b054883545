"""What a plan refuses, and what makes two runs the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_dcut.jobs.plan import Plan

Make = Callable[..., Plan]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_batch_size": 0}, "max_batch_size=0: give a positive integer"),
        ({"max_prompt_tokens": -1}, "max_prompt_tokens=-1"),
        ({"max_new_tokens": 1.5}, "max_new_tokens=1.5"),
        ({"max_new_tokens": True}, "max_new_tokens=True"),
        ({"budget": 1.5}, r"budget=1.5"),
        ({"seed": -1}, "option seed=-1"),
        ({"options": {"top_p": 3}}, "option top_p=3"),
        ({"options": {"num_beams": 3}}, "'num_beams' is not known"),
        ({"output": "-", "retry_errors": True}, "retry_errors needs the results of an earlier run"),
    ],
)
def test_refused(make_plan: Make, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make_plan(**fields)


@pytest.mark.parametrize("names", [("input", "output"), ("output", "rejects"), ("input", "rejects")])
def test_files_are_three(make_plan: Make, tmp_path: Path, names: tuple[str, str]) -> None:
    one, link = tmp_path / "one", tmp_path / "link"
    one.touch()
    link.symlink_to(one)
    with pytest.raises(ValueError, match="are the same file"):
        make_plan(**{names[0]: str(one), names[1]: str(link)})


def test_rejects_lie_beside_the_output(make_plan: Make, tmp_path: Path) -> None:
    assert make_plan().rejects_path == tmp_path / "out.jsonl.rejects"
    assert make_plan(rejects=tmp_path / "r").rejects_path == tmp_path / "r"
    assert make_plan(output="-").rejects_path is None
    assert make_plan(input="-", output="-").rejects_path is None


def test_what_changes_results_is_in_the_fingerprint(make_plan: Make, tmp_path: Path) -> None:
    other: dict[str, Any] = {
        "target": "b",
        "drafter": "none",
        "dtype": "bfloat16",
        "budget": 1.0,
        "max_new_tokens": 5,
        "options": {"temperature": 1.0},
        "seed": 1,
        "thinking": True,
        "token_ids": True,
    }
    same: dict[str, Any] = {
        "output": "o",
        "max_batch_size": 1,
        "max_prompt_tokens": 9,
        "strict": True,
        "retry_errors": True,
        "rejects": tmp_path / "r",
    }
    plan = make_plan()
    assert all(make_plan(**{name: value}).fingerprint() != plan.fingerprint() for name, value in other.items())
    assert make_plan(**same).fingerprint() == plan.fingerprint()


def test_no_drafter_is_plain_decoding(make_plan: Make) -> None:
    assert make_plan(drafter="none").dcut.budget == "none"
    assert make_plan().dcut.budget == 0.5
