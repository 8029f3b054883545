"""What numbers were measured on: machine, versions, commit; and how much memory a run took."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_dcut.machine import processor

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def machine() -> dict[str, Any]:
    """Returns what the numbers were measured on."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def commit() -> str | None:
    """Returns the commit of the sources, with "+" behind it where files differ; None outside a repository."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


@contextmanager
def peak_memory(device: torch.device) -> Iterator[list[int | None]]:
    """Gives a list that holds one number on leaving: the most bytes in use meanwhile.

    On a GPU what torch has allocated on it, on Linux what the whole process holds in memory; None elsewhere.
    """
    held: list[int | None] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield held
        held.append(torch.cuda.max_memory_allocated(device))
        return
    resets = os.access(_RESET, os.W_OK)
    if resets:
        _RESET.write_text("5")  # the kernel's word for: begin the peak anew
    yield held
    held.append(_resident_peak() if resets else None)


def _resident_peak() -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
