"""What the seconds of a step depend on besides models."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch
import transformers


def machine_fingerprint(device: torch.device) -> dict[str, Any]:
    """Returns what the seconds of a step depend on besides models: device, threads and versions."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    return {
        "device": f"{device.type} {name}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def processor() -> str:
    """Returns the processor's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
