"""DFlash2's dynamic convolution: short, causal, over the rows of a block, around a sublayer.

    out[t] = sum over offsets o of (base[o] + dynamic[t, o]) * rows[t - o]

`base` has a number for each channel; `dynamic` is predicted from the rows before the first of the two convolutions, one
number for each group of channels. Rows before the block count as zero: the context takes no part.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_dcut.drafters.dflash.config import DFlashConfig


class DynamicConvolution(nn.Module):
    """The two convolutions around one sublayer.

    Args:
        config: has `conv_kernel_size` and `conv_group_size`.
    """

    def __init__(self, config: DFlashConfig):
        super().__init__()
        assert config.conv_kernel_size is not None
        assert config.conv_group_size is not None
        self.size, self.group = config.conv_kernel_size, config.conv_group_size
        self.base_kernel = nn.Parameter(torch.empty(2, self.size, config.hidden_size))
        kernels = 2 * self.size * (config.hidden_size // self.group)
        self.kernel_projection = nn.Linear(config.hidden_size, kernels, bias=False)

    def around(self, sublayer: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """Returns what the sublayer makes of the convolved rows, convolved again: [B, n, hidden].

        Args:
            sublayer: from [B, n, hidden] to the same.
            rows: [B, n, hidden] of whole blocks.
        """
        before, after = self.kernel_projection(rows).unflatten(-1, (2, self.size, -1)).unbind(-3)
        inner = sublayer(self._convolve(rows, self.base_kernel[0], before))
        return self._convolve(inner, self.base_kernel[1], after)

    def _convolve(self, rows: Tensor, base: Tensor, dynamic: Tensor) -> Tensor:
        """Returns [B, n, hidden]; `base` is [size, hidden], `dynamic` [B, n, size, groups]."""
        kernel = base + dynamic.repeat_interleave(self.group, dim=-1)
        earlier = [F.pad(rows, (0, 0, offset, 0))[:, : rows.shape[1]] for offset in range(self.size)]
        return (kernel * torch.stack(earlier, dim=2)).sum(dim=2)
