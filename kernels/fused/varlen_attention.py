"""Attention of a packed ragged row by torch's variable-length attention (FlashAttention).

Slots are one long row of cells, so a request's K/V begin at `begin` and end after `used` cells; no block table is
needed, which would ask for pages that not every build has. Soft caps, sinks and trees are not in it.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    start: Tensor,
    begin: Tensor,
    used: Tensor,
    width: int,
    reach: int,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    ancestors: Tensor | None = None,
) -> Tensor:
    """Returns what `reference.packed_attention.packed_attention` does, without soft cap, sinks and ancestors.

    Raises:
        ValueError: one of those is given.
    """
    given = [n for n, x in (("softcap", softcap), ("sinks", sinks), ("ancestors", ancestors)) if x is not None]
    if given:
        raise ValueError(f"torch's varlen attention does not do {', '.join(given)}: use path='triton' or 'reference'")
    # Imported here: older torch lacks it.
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": scaling, "seqused_k": used}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        # Where there is no such parameter, grouped heads are taken as they are.
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    left = -1 if window is None else window - 1
    # To FlashAttention the queries of a request are its last ones, as ours are.
    out = varlen_attn(query, key, value, start, begin, width, reach, window_size=(left, 0), **options)
    assert isinstance(out, Tensor), "nothing beside the output was asked for"
    return out
