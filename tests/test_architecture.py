"""The order of the modules, read from the sources: imports point one way, stages do not know each other.

And what is public says what it is for.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "hf_dcut"

# Earlier to later; a unit may import the units to its left and above. A unit is a module of hf_dcut or a whole
# sub-package. Units that share a set do not import each other. "" is hf_dcut itself, with its public names.
STAGES = frozenset({"scores", "budget", "packing", "choosing", "commit"})
ORDER: tuple[str | frozenset[str], ...] = (
    *("types", "config", "wording", "swapping", "prepacking", "timing", "machine"),
    "kernels",
    *("states", "cache", "grouped", "ragged", "attention", "recurrence", "noise", "ranks", "text", "media", "adapters"),
    *("requests", "tiers"),
    *("lengths", "trial", "branching", "acceptance"),
    STAGES | {"drafters", "target", "cost_table"},
    *("drawing", "processors", "stats", "skipping", "calibration", "selecting", "memory", "compiling"),
    *("drafting", "fixed_step", "recording", "graphs", "replaying", "scheduling"),
    *("engine", "profiling", "assembly", "regeneration", "taps"),
    *("options", "seeds", "streaming", "padded", "preparing", "decoding", "generation"),
    *("batch_records", "intake", "parallel", "batching", "manager"),
    "",
    *("bench", "jobs", "train_plan", "training", "train_command", "evaluate_command", "app", "cli"),
)
RANK = {unit: rank for rank, units in enumerate(ORDER) for unit in ([units] if isinstance(units, str) else units)}


def imported_modules(source: str, known: set[str]) -> Iterator[tuple[int, str]]:
    """Yields line and dotted name of each hf_dcut module that the source imports when it runs, at any depth of code.

    Args:
        source: text of a Python file.
        known: dotted names of all modules, to tell a module from a name inside one.
    """
    todo: list[ast.AST] = [ast.parse(source)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            todo += node.orelse
            continue
        todo += ast.iter_child_nodes(node)
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [_module_of(node, alias.name, known) for alias in node.names]
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == PACKAGE)


def _module_of(node: ast.ImportFrom, name: str, known: set[str]) -> str:
    assert not node.level, f"line {node.lineno}: relative import"
    inner = f"{node.module}.{name}"
    return inner if inner in known else str(node.module)


def unit_of(module: str) -> str:
    """Returns the unit a dotted module name belongs to: "kernels" for hf_dcut.kernels.fused.pack."""
    return module.split(".")[1] if "." in module else ""


def violations(module: str, source: str, known: set[str]) -> list[str]:
    """Returns one line for each import of `module` that does not point at something earlier."""
    unit = unit_of(module)
    if unit not in RANK:
        return [f"{module}: give {unit!r} its place in ORDER"]
    found = []
    for line, name in imported_modules(source, known):
        other = unit_of(name)
        if other != unit and RANK.get(other, len(ORDER)) >= RANK[unit]:
            found.append(f"{module}:{line} imports {name}, which is not earlier in ORDER")
        if ".reference." in f"{module}." and ".fused" in name:
            found.append(f"{module}:{line} imports {name}: a reference does not know its fused twin")
    return found


def package_folders() -> dict[str, Path]:
    """Returns folder by package name, as pyproject.toml says."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {}
    for package in setuptools["packages"]:
        head, tail = package, []
        while head not in setuptools["package-dir"]:
            head, _, last = head.rpartition(".")
            tail.insert(0, last)
        folders[package] = ROOT / setuptools["package-dir"][head] / Path(*tail)
    return folders


def shipped_modules() -> dict[str, Path]:
    """Returns file by dotted module name, for everything that is installed."""
    modules = {}
    for package, folder in package_folders().items():
        for path in sorted(folder.glob("*.py")):
            modules[package if path.stem == "__init__" else f"{package}.{path.stem}"] = path
    return modules


MODULES = shipped_modules()


@pytest.mark.parametrize("module", [name for name in MODULES if name != PACKAGE])
def test_imports_point_at_earlier_modules(module: str) -> None:
    assert violations(module, MODULES[module].read_text(), set(MODULES)) == []


KNOWN = {"hf_dcut", *(f"hf_dcut.{unit}" for unit in RANK if unit), "hf_dcut.kernels.fused", "hf_dcut.drafters.base"}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("hf_dcut.budget", "from hf_dcut.engine import Engine"),
        ("hf_dcut.budget", "import hf_dcut.engine"),
        ("hf_dcut.budget", "from hf_dcut import engine"),
        ("hf_dcut.budget", "from hf_dcut import DCutConfig"),
        ("hf_dcut.budget", "def late():\n    from hf_dcut.stats import StepStats"),
        ("hf_dcut.budget", "if TYPE_CHECKING:\n    pass\nelse:\n    import hf_dcut.engine"),
        ("hf_dcut.budget", "from hf_dcut.scores import score"),
        ("hf_dcut.commit", "from hf_dcut.packing import pack"),
        ("hf_dcut.packing", "from hf_dcut.drafters.base import Drafter"),
        ("hf_dcut.drafters.base", "from hf_dcut.target import Target"),
        ("hf_dcut.types", "from hf_dcut.config import DCutConfig"),
        ("hf_dcut.kernels.reference.pack", "from hf_dcut.kernels.fused import pack"),
        ("hf_dcut.brand_new", ""),
        ("hf_dcut.cli", "import hf_dcut.brand_new"),
    ],
)
def test_checker_finds_a_wrong_import(module: str, source: str) -> None:
    assert len(violations(module, source, KNOWN)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("hf_dcut.engine", "from hf_dcut.budget import choose\nfrom hf_dcut.types import Cut"),
        ("hf_dcut.budget", "from __future__ import annotations\nimport torch\nfrom hf_dcut import kernels"),
        ("hf_dcut.budget", "if TYPE_CHECKING:\n    from hf_dcut.engine import Engine"),
        ("hf_dcut.drafters.oracle", "from hf_dcut.drafters.base import Drafter"),
        ("hf_dcut.kernels", "from hf_dcut.kernels.fused import pack"),
        ("hf_dcut.cli", "import hf_dcut"),
    ],
)
def test_checker_lets_a_right_import_pass(module: str, source: str) -> None:
    assert violations(module, source, KNOWN) == []


def silent(name: str, source: str, methods: bool = True) -> list[str]:
    """Returns what is public in a module and has no docstring; one of a base's method serves those that override it."""
    tree = ast.parse(source)
    found = [] if ast.get_docstring(tree) else [name]
    kinds = (ast.FunctionDef, ast.ClassDef)
    public = [node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
    found += [f"{name}.{node.name}" for node in public if not ast.get_docstring(node)]
    for node in public if methods else ():
        if isinstance(node, ast.ClassDef):
            made = getattr(importlib.import_module(name), node.name)
            inner = [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
            silent_ones = [one for one in inner if one[0] != "_" and not inspect.getdoc(getattr(made, one))]
            found += [f"{name}.{node.name}.{one}" for one in silent_ones]
    return found


@pytest.mark.parametrize("module", MODULES)
def test_what_is_public_says_what_it_is_for(module: str) -> None:
    assert silent(module, MODULES[module].read_text()) == []


def test_silence_is_found() -> None:
    source = "def a():\n    pass\nclass B:\n    pass\ndef _c():\n    pass\ndef d():\n    'd'\n"
    assert silent("m", source, methods=False) == ["m", "m.a", "m.B"]


def test_every_package_folder_is_listed() -> None:
    homes = [ROOT / name for name in ("hf_dcut", "drafters", "app", "kernels/reference", "kernels/fused")]
    found = {path.parent for home in homes for path in home.rglob("*.py")}
    assert found - set(package_folders().values()) == set()


def test_every_listed_package_is_a_regular_one() -> None:
    assert [name for name, folder in package_folders().items() if not (folder / "__init__.py").is_file()] == []


def test_kernels_folder_is_no_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists(), "it would hide Hugging Face's `kernels`"


def test_no_package_under_tests() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []
