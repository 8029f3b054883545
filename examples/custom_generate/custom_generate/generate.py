"""`model.generate(..., custom_generate="owner/dcut", trust_remote_code=True)`: what Transformers loads and calls.

Transformers hands over every argument of `generate`, prepared in no way, absent ones as None; hf_dcut does the rest.
"""

from __future__ import annotations

import functools
from typing import Any

import hf_dcut

# They tell Transformers where this file is, and are passed on along with what the user gave.
_LOADING = ("revision", "token", "cache_dir", "force_download", "local_files_only", "proxies", "code_revision")


def generate(model: Any, dcut: Any = True, drafter: str | None = None, **arguments: Any) -> Any:
    """Returns what `hf_dcut.generate` does: the target's own output, int64 [B, P + longest], or a `DCutOutput`.

    Args:
        model: the target, a causal language model of Transformers.
        dcut: True picks the budget at every step; or a share in (0, 1], "none", a dict or a `hf_dcut.DCutConfig`.
        drafter: folder or Hub id of a drafter; instead of it, `assistant_model` takes a loaded one, and
            `prompt_lookup_num_tokens` needs none.
        arguments: as for `generate`.

    Raises:
        ValueError, TypeError: something that dcut does not do, named.
    """
    given = {name: value for name, value in arguments.items() if value is not None and name not in _LOADING}
    if drafter is not None:
        if "assistant_model" in given:
            raise ValueError(f"drafter={drafter!r} and assistant_model are two drafters: give one of them")
        given["assistant_model"] = _load(drafter, str(model.device))
    return hf_dcut.generate(model, dcut=dcut, **given)


@functools.lru_cache(maxsize=4)
def _load(drafter: str, device: str) -> hf_dcut.Drafter:
    """Returns a drafter; kept, since `generate` is called again and again."""
    return hf_dcut.AutoDrafter.from_pretrained(drafter, device=device)
