"""What is read before anything is installed: extras, citation, workflow. They agree with the package."""

from __future__ import annotations

import re
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml

import hf_dcut

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HOMES = ("README.md", "docs", "examples", "hf_dcut", "drafters", "app", "kernels")
NAMED = re.compile(r"hf-dcut\[([\w,-]+)\]")


def texts() -> list[Path]:
    """Returns the files that could tell somebody to install an extra."""
    found = chain.from_iterable(([ROOT / home] if home.endswith(".md") else (ROOT / home).rglob("*")) for home in HOMES)
    return [path for path in found if path.suffix in (".md", ".py", ".txt", ".ipynb")]


def test_extras_that_are_named_exist() -> None:
    there = set(PROJECT["optional-dependencies"])
    named = {extra for path in texts() for names in NAMED.findall(path.read_text()) for extra in names.split(",")}
    assert named
    assert named <= there
    assert {"bench", "demo", "dev", "train"} <= there


def test_dev_has_what_the_other_extras_have_but_frameworks() -> None:
    (own,) = [name for name in PROJECT["optional-dependencies"]["dev"] if name.startswith("hf-dcut[")]
    included = set(NAMED.findall(own)[0].split(","))
    assert {"bench", "demo", "docs", "structured", "train", "triton"} <= included


def test_the_citation_is_of_this_version() -> None:
    citation: dict[str, Any] = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == hf_dcut.__version__
    assert citation["license"] == PROJECT["license"]
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert [paper["url"].rpartition("/")[2] for paper in citation["references"]] == ["2607.14647"]


def test_the_workflow_runs_the_script_with_the_oldest_and_the_newest_transformers() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    job = workflow["jobs"]["cpu"]
    (wanted,) = [name for name in PROJECT["dependencies"] if name.startswith("transformers")]
    oldest = re.search(r">=([\d.]+)", wanted)
    assert oldest is not None
    pinned = {entry["transformers"] for entry in job["strategy"]["matrix"]["include"]}
    assert pinned == {f"transformers=={oldest[1]}.0", wanted}
    pythons = {entry["python"] for entry in job["strategy"]["matrix"]["include"]}
    assert PROJECT["requires-python"].removeprefix(">=") in pythons
    assert job["env"]["TRANSFORMERS"] == "${{ matrix.transformers }}"
    assert any(step.get("run") == "bash .ci/run" for step in job["steps"])


@pytest.mark.parametrize("target", ["setup", "check", "docs", "test"])
def test_the_script_does_what_contributors_are_told(target: str) -> None:
    assert f"\nmake {target}\n" in (ROOT / ".ci" / "run").read_text()
    assert f"make {target} " in (ROOT / "CONTRIBUTING.md").read_text()
