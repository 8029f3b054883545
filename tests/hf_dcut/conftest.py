"""What the tests of the stages share: a batch of requests, written in columns of small numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_dcut.types import Batch


def build_batch(
    length: Sequence[int],
    room: Sequence[int] | None = None,
    anchor: Sequence[int] | None = None,
    rope: Sequence[int] = (),
) -> Batch:
    """Returns requests in slots 0, 1, ..: with plenty of room, anchors 50, 51, .. and plain positions by default."""
    rows = len(length)
    columns = (
        range(rows),
        length,
        anchor or range(50, 50 + rows),
        room or [99] * rows,
        range(rows),
        rope or [0] * rows,
    )
    return Batch(*(torch.tensor(list(column), dtype=torch.int64) for column in columns))


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., Batch]:
    """`make_batch(length, room=None, anchor=None, rope=())`, one number a request in each."""
    return build_batch


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    """`launch(scenario, model, processes)`: what each process of `launched.py` got."""
    script = Path(__file__).with_name("launched.py")

    def run(scenario: str, model: PreTrainedModel, processes: int) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp(model.config.model_type)
        model.save_pretrained(folder)
        command = [sys.executable, "-P"]
        if processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        # Without PYTHONSAFEPATH the script's folder, tests/hf_dcut, would stand in for the package.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
        command += [str(script), scenario, str(folder), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
        assert done.returncode == 0, done.stderr[-5000:]
        return [json.loads((folder / f"{scenario}-{processes}-{n}.json").read_text()) for n in range(processes)]

    return run
