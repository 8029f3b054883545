"""Every `hf-dcut` command and option that README and docs name is one that the parser knows."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_dcut.cli import parser

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "kernels/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^ {4}.*\n)+", re.MULTILINE)
INLINE = re.compile(r"`([^`]+)`")
# What comes before our own arguments: the script, in an environment or not, or its module under a launcher.
CALL = re.compile(r"(?:(?:^|\|)\s*(?:\w+=\S*\s+)*(?:\S*/)?hf-dcut|-m hf_dcut\.cli)(?=\s|$)(?P<rest>.*)$")
# An option of a script of ours.
EXAMPLE = re.compile(r'add_argument\("(--[\w-]+)"')
# Options of the launchers, accelerate and torchrun.
FOREIGN = {"--multi_gpu", "--cpu", "--num_processes", "--standalone", "--nproc-per-node", "--nnodes"}


def commands(text: str) -> Iterator[str]:
    """Yields the arguments of every call of `hf-dcut` in code: blocks in fences, indented ones, and inside lines."""
    fenced = [match["body"] for match in FENCE.finditer(text) if match["language"] != "python"]
    prose = FENCE.sub("", text)
    indented = INDENTED.findall(prose)
    inline = [re.sub(r"\s+", " ", code) for code in INLINE.findall(INDENTED.sub("", prose))]
    for code in (*fenced, *indented, *inline):
        for line in re.sub(r"\\\n\s*", "", code).split("\n"):
            call = CALL.search(line)
            if call:
                yield call["rest"].strip()


def options(text: str) -> set[str]:
    """Returns the options that prose names by themselves: `--rounds`, `--rounds 2`."""
    prose = FENCE.sub("", text)
    return {match[1] for code in INLINE.findall(prose) if (match := re.match(r"(--[\w-]+)(?:\s|$)", code))}


def problem(rest: str) -> str | None:
    """Returns what the parser says against a command; None if it takes it. A bare name needs no arguments."""
    arguments = shlex.split(rest, comments=True)
    if " ".join(arguments).removesuffix(" ...") in known(parser()):
        return None
    try:
        parser().parse_args(arguments)
    except SystemExit as stop:
        return None if stop.code == 0 else f"hf-dcut {rest}"
    return None


def known(made: argparse.ArgumentParser, name: str = "") -> dict[str, argparse.ArgumentParser]:
    """Returns the parser by name of each command, "" and "bench report" among them."""
    found = {name: made}
    for action in made._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, below in action.choices.items():
                found |= known(below, f"{name} {word}".strip())
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_are_parsed(page: Path) -> None:
    wrong = [found for rest in commands(page.read_text()) if (found := problem(rest))]
    assert wrong == []


def test_options_of_all_pages_exist() -> None:
    there = {text for made in known(parser()).values() for action in made._actions for text in action.option_strings}
    scripts = (ROOT / "examples").rglob("*.py")
    there |= {text for script in scripts for text in EXAMPLE.findall(script.read_text())}
    named = {(str(page.relative_to(ROOT)), text) for page in PAGES for text in options(page.read_text())}
    assert {(page, text) for page, text in named if text not in there | FOREIGN} == set()


PAGE = """
Do `hf-dcut train` or `hf-dcut bench
report RUN.jsonl --out DIR`, with `--rounds 2` and `--no-such`.

    .venv/bin/hf-dcut demo      # a page
    accelerate launch --cpu -m hf_dcut.cli run ...

```bash
hf-dcut profile --target A \\
    --wrong B
```
```python
"hf-dcut none of this"
```
"""


def test_commands_are_found() -> None:
    found = [
        "profile --target A --wrong B",
        "demo      # a page",
        "run ...",
        "train",
        "bench report RUN.jsonl --out DIR",
    ]
    assert list(commands(PAGE)) == found
    assert options(PAGE) == {"--rounds", "--no-such"}


@pytest.mark.parametrize("rest", ["train", "bench report", "run ...", "demo # all", "bench report R --out D", "run -h"])
def test_right_commands_pass(rest: str) -> None:
    assert problem(rest) is None


@pytest.mark.parametrize("rest", ["fly", "bench --no-such 1", "train --target A", "bench --batch many", "demo here"])
def test_wrong_commands_are_found(rest: str) -> None:
    assert problem(rest) == f"hf-dcut {rest}"
