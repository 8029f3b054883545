"""The models of a job: which they are, to the byte, and how they are read.

Weights are read from safetensors only, and code of a repository runs only if the plan says so.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from hf_dcut.drafters import AutoDrafter
from hf_dcut.drafters.base import Drafter
from hf_dcut.jobs.plan import NO_DRAFTER, Plan

_SAMPLE = 1 << 16
_TEXTS = ("*.json", "*.jinja", "*.model", "*.txt")


def identity(name: str, revision: str | None) -> str:
    """Returns the commit of a Hub repository, or a digest of a folder: of its texts, and of samples of its weights.

    Args:
        name: folder or Hub id.
        revision: branch, tag or commit; a folder has none.

    Raises:
        FileNotFoundError: neither a folder with a config.json nor a repository that can be read.
        ValueError: a revision of a folder.
    """
    folder = Path(name)
    if folder.is_dir():
        if revision is not None:
            raise ValueError(f"revision={revision!r}: {name} is a folder, which has no revisions. Leave it out")
        return _digest(folder)
    try:
        return Path(cached_file(name, "config.json", revision=revision)).parent.name
    except OSError as error:
        raise FileNotFoundError(f"{name!r} is no folder, and no Hub repository that can be read: {error}") from error


def load_target(
    plan: Plan, revision: str | None, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Returns the target and its tokenizer.

    Args:
        plan: names them.
        revision: commit of a Hub repository; None for a folder.
        device: where the target goes.
    """
    named = {"revision": revision or "main", "trust_remote_code": plan.trust_remote_code}
    tokenizer = AutoTokenizer.from_pretrained(plan.target, **named)
    model = AutoModelForCausalLM.from_pretrained(plan.target, dtype=plan.dtype, use_safetensors=True, **named)
    return model.eval().to(device), tokenizer


def load_drafter(plan: Plan, revision: str | None, device: torch.device) -> Drafter | None:
    """Returns the drafter; None for "none"."""
    if plan.drafter == NO_DRAFTER:
        return None
    return AutoDrafter.named(plan.drafter, revision=revision, device=device)


def _digest(folder: Path) -> str:
    """Returns a digest that changes when a file of the folder does: texts whole, of weights the size and both ends."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} has no config.json: give the folder of a model")
    digest = hashlib.sha256()
    for path in sorted({path for pattern in (*_TEXTS, "*.safetensors") for path in folder.glob(pattern)}):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            if path.suffix == ".safetensors":
                digest.update(file.read(_SAMPLE))
                file.seek(max(0, path.stat().st_size - _SAMPLE))
            digest.update(file.read())
    return digest.hexdigest()
