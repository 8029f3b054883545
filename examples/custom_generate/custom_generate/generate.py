"""`model.generate(..., custom_generate="owner/dcut", trust_remote_code=True)`: what Transformers loads and calls.

Transformers hands over every argument of `generate`, prepared in no way, absent ones as None; hf_dcut does the rest.
"""

from __future__ import annotations

import functools
from typing import Any

import hf_dcut

# They tell Transformers where this file is, and are passed on along with what the user gave.
_LOADING = ("revision", "token", "cache_dir", "force_download", "local_files_only", "proxies", "code_revision")


def generate(model: Any, drafter: Any = None, budget: Any = True, **arguments: Any) -> Any:
    """Returns what `hf_dcut.generate` does: the target's own output, int64 [B, P + longest], or a `DCutOutput`.

    Args:
        model: the target, a causal language model of Transformers.
        drafter: folder or Hub id of a drafter, or a loaded one; beside `prompt_lookup_num_tokens` none is needed.
        budget: True picks it at every step; or a share in (0, 1], "none", a dict or a `hf_dcut.DCutConfig`.
        arguments: as for `generate`.

    Raises:
        ValueError, TypeError: something that dcut does not do, named.
    """
    given = {name: value for name, value in arguments.items() if value is not None and name not in _LOADING}
    # Once hf_dcut is imported, `generate` itself takes these two; here they would mean something else each time.
    for name, instead in (("dcut", "budget"), ("assistant_model", "drafter")):
        if name in given:
            raise ValueError(f"{name} does not work with custom_generate: pass {instead}=... to this repository")
    if isinstance(drafter, str):
        drafter = _load(drafter, str(model.device))
    return hf_dcut.generate(model, dcut=budget, assistant_model=drafter, **given)


@functools.lru_cache(maxsize=4)
def _load(drafter: str, device: str) -> hf_dcut.Drafter:
    """Returns a drafter; kept, since `generate` is called again and again."""
    return hf_dcut.AutoDrafter.named(drafter, device=device)
