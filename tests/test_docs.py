"""The code of README and docs runs as it stands there, behind that of the first page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FIRST = ROOT / "docs" / "index.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# A block behind such a comment is not run: <!-- not run: needs a GPU -->
BLOCK = re.compile(r"^(?P<skip><!-- not run: .+ -->\n)?```python\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[str]:
    """Returns the Python blocks of a page that are to be run."""
    return [match["code"] for match in BLOCK.finditer(text) if not match["skip"]]


def test_blocks_are_found() -> None:
    text = "a\n```python\nx = 1\n```\n<!-- not run: needs a GPU -->\n```python\ny\n```\n```bash\nz\n```\n"
    assert blocks(text) == ["x = 1\n"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page.read_text())], ids=lambda page: str(page.relative_to(ROOT))
)
def test_the_code_of_a_page_runs(page: Path, smollm2: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page, in order, as a reader would type them at the top of the repository."""
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {"__name__": "__main__"}
    own = blocks(page.read_text())
    first = [] if any("from_pretrained" in code for code in own) else blocks(FIRST.read_text())
    for code in first + own:
        exec(compile(code, str(page), "exec"), names)
