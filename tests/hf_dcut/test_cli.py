"""The commands: what they refuse, and with which status."""

from __future__ import annotations

import pytest

from hf_dcut import __version__
from hf_dcut.cli import main


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"hf-dcut {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--quick", "--batch", "4"], "--quick sets --batch and --prompts"),
        (["bench", "--target", "/no/such/folder"], "/no/such/folder"),
        (["profile", "--target", "/no/such/folder"], "/no/such/folder"),
    ],
)
def test_what_cannot_be_done_ends_with_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("batch", ["0", "4,-1", "many"])
def test_batch_sizes_are_positive(batch: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--batch", batch])
    assert stop.value.code == 2
