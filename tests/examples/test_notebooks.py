"""The notebooks run from top to bottom, and what they show is kept in their files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
LARGEST = 400_000  # bytes
# Somebody's folders. An address or a chat's "/n" is none of them.
OWN_FOLDER = re.compile(r"(?<![\w./:])/(?:home|root|tmp|Users|work|usr|opt|mnt|content|var)/|[A-Z]:\\\\")


def shown(notebook: Any) -> list[Any]:
    """Returns the outputs of all cells."""
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def faults(notebook: Any, content: str) -> list[str]:
    """Returns what is wrong with a notebook that is to be kept.

    Args:
        notebook: as nbformat reads it.
        content: its file.
    """
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = shown(notebook)
    checks = {
        "it is too large": len(content) > LARGEST,
        "it was not run, or not in order": [c.execution_count for c in code] != list(range(1, len(code) + 1)),
        "it shows nothing": not outputs,
        "a cell raised": any(output.output_type == "error" for output in outputs),
        "warnings or progress are kept": any(output.get("name") == "stderr" for output in outputs),
        "a widget is kept": "widget" in content,
        "it names a folder of one machine": bool(OWN_FOLDER.search(content)),
    }
    return [fault for fault, there in checks.items() if there]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_file_holds_a_clean_run(path: Path) -> None:
    assert faults(nbformat.read(path, as_version=4), path.read_text()) == []


@pytest.mark.parametrize("text", ["/home/ann/x", "see /tmp/a1/drafter", "'/root/.cache'", r"C:\\\\Users"])
def test_folders_of_a_machine_are_found(text: str) -> None:
    assert OWN_FOLDER.search(text)


@pytest.mark.parametrize("text", ["../../build/tmp/x", "https://a.example/home/x", "tokens/s", "Hub/home/x"])
def test_other_slashes_are_none(text: str) -> None:
    assert not OWN_FOLDER.search(text)


def test_there_are_notebooks_and_readme_names_each() -> None:
    readme = (FOLDER.parents[1] / "README.md").read_text()
    assert len(PATHS) == 3
    assert [path.name for path in PATHS if f"examples/notebooks/{path.name}" not in readme] == []


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_it_runs(path: Path, load_example: Any, smollm2: Path) -> None:
    """Cells raise nothing and show as much as the file does."""
    kept = nbformat.read(path, as_version=4)
    notebook = load_example("notebooks/execute").executed(path.stem)
    assert [output.output_type for output in shown(notebook)] == [output.output_type for output in shown(kept)]
    assert faults(notebook, nbformat.writes(notebook)) == []
