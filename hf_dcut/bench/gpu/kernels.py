"""Every kernel against its reference on the device, and its seconds beside what it replaces."""

from __future__ import annotations

import inspect
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from hf_dcut.bench.gpu.clock import Clock
from hf_dcut.bench.gpu.rig import Rig
from hf_dcut.bench.kernel_check import Case, check_kernels, taken_paths, time_kernels
from hf_dcut.bench.machine import machine


def device(rig: Rig, clock: Clock) -> dict[str, Any]:
    """Returns what the check runs on, what torch has there, and the path each op takes."""
    facts = {**machine(), "system": platform.platform(), "cuda": torch.version.cuda}
    for name in ("triton", "accelerate", "huggingface_hub"):
        facts[name] = _version(name)
    if rig.device.type == "cuda":
        facts["gpu_bytes"] = torch.cuda.get_device_properties(rig.device).total_memory
        facts["capability"] = list(torch.cuda.get_device_capability(rig.device))
    return {"machine": facts, "features": features(), "paths": taken_paths(rig.device), "passed": True, "skipped": []}


def features() -> dict[str, list[str] | None]:
    """Returns what differs between versions of torch and is looked for: arguments of varlen attention, None without."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return {"varlen_attn": None}
    return {"varlen_attn": list(inspect.signature(varlen_attn).parameters)}


def kernels(rig: Rig, clock: Clock) -> dict[str, Any]:
    """Returns one entry for each op, path and case: whether it does what the reference does."""
    checks = check_kernels(rig.device, rig.tiny, clock.late)
    passed = all(check["passed"] for check in checks if "skipped" not in check)
    return {"checks": checks, "passed": passed, "skipped": _skipped(checks)}


def times(rig: Rig, clock: Clock) -> dict[str, Any]:
    """Returns one entry for each op, path and case with its seconds on the device."""
    found = time_kernels(rig.device, rig.tiny, late=clock.late)
    return {"times": found, "passed": all("fault" not in case for case in found), "skipped": _skipped(found)}


def _skipped(cases: list[Case]) -> list[dict[str, str]]:
    return [
        {"what": " ".join((case["op"], case["path"], case["case"])), "why": case["skipped"]}
        for case in cases
        if "skipped" in case
    ]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
