"""Attention of a packed ragged row by torch's variable-length attention (FlashAttention).

Slots are one long row of cells, so a request's K/V begin at `begin` and end after `used` cells; no block table is
needed, which would ask for pages that not every build has. Soft caps, sinks and trees are not in it.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16)


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

    shared = query.shape[1] != key.shape[1]
    # Where there is no such parameter, grouped heads are taken as they are.
    grouped = {"enable_gqa": shared} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    left = -1 if window is None else window - 1
    # To FlashAttention the queries of a request are its last ones, as ours are.
    return varlen_attn(
        query,
        key,
        value,
        start,
        begin,
        width,
        reach,
        scale=scaling,
        window_size=(left, 0),
        seqused_k=used,
        **grouped,
    )
