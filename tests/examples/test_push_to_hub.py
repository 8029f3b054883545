"""What would go to the Hub, without a Hub."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("push_to_hub", ROOT / "examples" / "push_to_hub.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Hub:
    """Stands in for the Hub: keeps what it is told."""

    def __init__(self) -> None:
        self.repositories: list[tuple[str, dict[str, Any]]] = []
        self.commits: list[tuple[str, dict[str, str], dict[str, Any]]] = []

    def create_repo(self, name: str, **options: Any) -> str:
        self.repositories.append((name, options))
        return f"hub/{name}"

    def create_commit(self, name: str, operations: list[Any], **options: Any) -> None:
        self.commits.append((name, {o.path_in_repo: str(o.path_or_fileobj) for o in operations}, options))


@pytest.fixture
def hub(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub()
    monkeypatch.setattr(script, "HfApi", lambda: made)
    return made


@pytest.fixture
def drafter(tmp_path: Path) -> Callable[[str], Path]:
    """`drafter(front)`: a folder with a config, weights and a card of that front matter."""

    def build(front: str) -> Path:
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.safetensors").write_bytes(b"weights")
        (tmp_path / "README.md").write_text(f"---\n{front}\n---\n\n# A drafter\n")
        (tmp_path / "__pycache__").mkdir()
        (tmp_path / "__pycache__" / "x.pyc").write_bytes(b"")
        return tmp_path

    return build


GOOD = "base_model: o/m\nlibrary_name: hf-dcut\nlicense: mit\ntags: [speculative-decoding]"


def test_custom_generate_is_pushed_private_with_the_models_files(script: ModuleType, hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("the model's own card")
    assert script.main(["custom-generate", "o/dcut", "--model", str(tmp_path)]) == 0
    assert hub.repositories == [
        ("o/dcut", {"repo_type": "model", "private": True, "exist_ok": True, "space_sdk": None})
    ]
    ((name, files, options),) = hub.commits
    assert name == "o/dcut"
    assert options == {"commit_message": "Update", "repo_type": "model"}
    assert set(files) == {
        "README.md",
        "config.json",
        "custom_generate/generate.py",
        "custom_generate/requirements.txt",
    }
    assert Path(files["README.md"]) == ROOT / "examples" / "custom_generate" / "README.md"


def test_drafter_is_pushed_with_its_card(script: ModuleType, hub: Hub, drafter: Callable[[str], Path]) -> None:
    assert script.main(["drafter", "o/d", "--folder", str(drafter(GOOD)), "--public", "--message", "New"]) == 0
    assert hub.repositories[0][1]["private"] is False
    ((_, files, options),) = hub.commits
    assert set(files) == {"README.md", "config.json", "model.safetensors"}
    assert options["commit_message"] == "New"


def test_space_is_pushed_with_a_drafter(script: ModuleType, hub: Hub, drafter: Callable[[str], Path]) -> None:
    assert script.main(["space", "o/s", "--drafter", str(drafter(GOOD))]) == 0
    assert hub.repositories[0][1]["space_sdk"] == "gradio"
    ((_, files, options),) = hub.commits
    assert options["repo_type"] == "space"
    assert {"app.py", "requirements.txt", "README.md", "drafter/config.json"} <= set(files)
    assert Path(files["README.md"]) == ROOT / "examples" / "space" / "README.md"


@pytest.mark.parametrize(
    ("front", "words"),
    [
        (GOOD.replace("hf-dcut", "transformers"), "front matter needs library_name: hf-dcut"),
        (GOOD.replace("license: mit\n", ""), "front matter needs license"),
        (GOOD.replace("speculative-decoding", "fast"), "front matter needs tags: speculative-decoding"),
    ],
)
def test_a_card_that_says_too_little_is_refused(
    script: ModuleType,
    hub: Hub,
    drafter: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
    front: str,
    words: str,
) -> None:
    assert script.main(["drafter", "o/d", "--folder", str(drafter(front))]) == 2
    assert words in capsys.readouterr().err
    assert not hub.repositories


def test_a_folder_that_is_no_drafter_is_refused(
    script: ModuleType, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["drafter", "o/d", "--folder", str(tmp_path)]) == 2
    assert "has no config.json, README.md" in capsys.readouterr().err


def test_a_dry_run_uploads_nothing(script: ModuleType, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["drafter", "o/d", "--folder", str(ROOT / "examples" / "drafter"), "--dry-run"]) == 0
    assert "model.safetensors" in capsys.readouterr().out
    assert not hub.repositories + hub.commits
