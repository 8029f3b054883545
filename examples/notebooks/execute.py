"""Runs the notebooks of this folder and keeps what they show: `python examples/notebooks/execute.py [NAME ...]`.

Progress bars and what goes to standard error, such as warnings of libraries, are left out, and so are times of the run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.ipynb")))


def executed(name: str, seconds: int = 600) -> nbformat.NotebookNode:
    """Returns a notebook with the outputs of a new run.

    Args:
        name: without its ending.
        seconds: that a cell may take.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised, and what.
    """
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    options = {"kernel_name": "python3", "record_timing": False, "store_widget_state": False, "coalesce_streams": True}
    NotebookClient(notebook, timeout=seconds, resources={"metadata": {"path": str(FOLDER)}}, **options).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if _is_kept(output)]
    return notebook


def _is_kept(output: nbformat.NotebookNode) -> bool:
    return output.get("name") != "stderr" and not any("widget" in kind for kind in output.get("data", ()))


def main() -> None:
    """Runs those that are named, or all, and writes them back."""
    for name in sys.argv[1:] or NAMES:
        print(name)
        nbformat.write(executed(name), FOLDER / f"{name}.ipynb")


if __name__ == "__main__":
    main()
