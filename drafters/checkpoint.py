"""A drafter's folder: config.json beside safetensors weights, on disk or on the Hub.

Weights are read from safetensors only, since unpickling a file runs whatever code it holds.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.errors import RevisionNotFoundError as RevisionError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# What may lie beside the weights and belongs to them: tensors of a drafter that were published on their own.
BESIDE = ("mask_embedding.safetensors",)
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def locate(name: str | os.PathLike[str], revision: str | None = None, subfolder: str | None = None) -> Path:
    """Returns the folder that holds a drafter, after downloading it when `name` is a Hub repository.

    Args:
        name: a folder, or a Hub repository such as "owner/drafter".
        revision: branch, tag or commit of the repository. Published drafters are retrained in place: pin a commit.
        subfolder: where in the folder or repository the drafter lies.

    Raises:
        FileNotFoundError: neither a folder nor a repository that can be read.
    """
    root = Path(name)
    if not root.is_dir():
        root = _download(os.fspath(name), revision, subfolder)
    elif revision is not None:
        raise ValueError(f"revision={revision!r}: {name} is a folder, which has no revisions. Leave revision out")
    folder = root / subfolder if subfolder else root
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} has no {CONFIG}: give the folder (or subfolder=) of a drafter")
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the content of the folder's config.json."""
    path = folder / CONFIG
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder} has no {CONFIG}: give the folder of a drafter") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON ({error}): download or save the drafter again") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}: a config is a JSON object")
    return values


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Returns the folder's weights by name, on the CPU: from one safetensors file, or from the shards of an index."""
    tensors: dict[str, Tensor] = {}
    for file in _files(folder):
        tensors |= _read(file)
    return tensors


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the folder's weights by name, from the headers of its files alone."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _files(folder):
        shapes |= _read_header(file)
    return shapes


def config_of(module: nn.Module) -> dict[str, Any]:
    """Returns what would be the config.json of a loaded model; an empty one when it has no config.

    A model that was not read from a folder may not know its architecture, which is then the name of its class.
    """
    config: Any = getattr(module, "config", None)
    values: dict[str, Any] = config.to_dict() if hasattr(config, "to_dict") else {}
    return values if not values or values.get("architectures") else {**values, "architectures": [type(module).__name__]}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Writes a drafter's config.json and model.safetensors into `folder`, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
        folder / WEIGHTS,
        {"format": "pt"},
    )


def parse_dtype(value: str | torch.dtype, name: str = "dtype") -> torch.dtype:
    """Returns the floating dtype that `value` names, such as "bfloat16"."""
    dtype = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype) or dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"{name}={value!r}: give float32, bfloat16, float16 or float64, by name or as a torch.dtype")
    return dtype


def _download(name: str, revision: str | None, subfolder: str | None) -> Path:
    prefix = f"{subfolder.strip('/')}/" if subfolder else ""
    patterns = [f"{prefix}*.json", f"{prefix}*.safetensors"]
    try:
        # In these patterns a star crosses folders: what lies deeper is another model.
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=[f"{prefix}*/*"])
        )
    except RevisionError as error:
        raise FileNotFoundError(f"revision={revision!r}: the Hub repository {name} has none of that name") from error
    except (HFValidationError, RepositoryNotFoundError, LocalEntryNotFoundError) as error:
        raise FileNotFoundError(
            f"drafter {name!r}: there is no such folder, and no Hub repository of that name could be read "
            f"({type(error).__name__}). Check the path, or the name, the network and your access to it"
        ) from error


def _files(folder: Path) -> list[Path]:
    """Returns the files that hold the folder's weights."""
    beside = [folder / name for name in BESIDE if (folder / name).is_file()]
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS, *beside]
    if not (folder / INDEX).is_file():
        raise FileNotFoundError(_nothing_to_read(folder))
    return _shards(folder / INDEX) + beside


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise _missing(path) from None
    except SafetensorError as error:
        raise _broken(path, error) from error


def _read_header(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(path, "pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no dict)
    except FileNotFoundError:
        raise _missing(path) from None
    except SafetensorError as error:
        raise _broken(path, error) from error


def _missing(path: Path) -> FileNotFoundError:
    return FileNotFoundError(f"{path} is named by {INDEX} but missing: download or save the drafter again")


def _broken(path: Path, error: SafetensorError) -> ValueError:
    return ValueError(f"{path} is not a whole safetensors file ({error}): download it again")


def _shards(index: Path) -> list[Path]:
    """Returns the files that an index names, each once."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not an index of shards ({type(error).__name__}): download it again") from error
    for name in names:
        # An index comes from strangers: it may name its neighbours, not files elsewhere on this machine.
        if Path(name).name != name:
            raise ValueError(f"{index} names {name!r}: shards lie beside their index")
    return [index.parent / name for name in names]


def _nothing_to_read(folder: Path) -> str:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        return (
            f"{folder} has pickled weights only ({', '.join(pickles)}), which can run code when they are read. "
            f"Convert them to {WEIGHTS} with safetensors.torch.save_file"
        )
    return f"{folder} has no weights: {WEIGHTS} or {INDEX} is needed"
