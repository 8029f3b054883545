"""The built wheel: hf_dcut and nothing beside it, with every module, the type marker and the data."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("hf_dcut", "drafters", "kernels", "app")
FILES = ("pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    """The wheel, built from a copy: setuptools would pack what an earlier build left in build/."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    tree.mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, tree)
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(tree)], check=True)
    (path,) = folder.glob("*.whl")
    return zipfile.Path(path)


def names(wheel: zipfile.Path) -> set[str]:
    return set(wheel.root.namelist())


def test_only_hf_dcut_is_installed(wheel: zipfile.Path) -> None:
    tops = {name.split("/")[0] for name in names(wheel)}
    (info,) = tops - {"hf_dcut"}
    assert info.startswith("hf_dcut-")
    assert info.endswith(".dist-info")
    assert (wheel / info / "top_level.txt").read_text().split() == ["hf_dcut"]
    assert (wheel / info / "licenses" / "LICENSE").is_file()


def test_every_module_is_in_the_wheel(wheel: zipfile.Path) -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    homes = {folder: package.replace(".", "/") for package, folder in setuptools["package-dir"].items()}
    expected = {
        str(home / path.relative_to(ROOT / folder))
        for folder, home in ((folder, Path(home)) for folder, home in homes.items())
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {name for name in names(wheel) if name.endswith(".py")} == expected


def test_type_marker_and_data_are_in_the_wheel(wheel: zipfile.Path) -> None:
    data = {f"hf_dcut/bench/data/{path.name}" for path in (ROOT / "hf_dcut" / "bench" / "data").iterdir()}
    assert data
    assert names(wheel) >= data | {"hf_dcut/py.typed"}
