"""What the kernels' tests share: the device fused kernels run on, a GPU or Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where fused kernels run here. Tests that need it are skipped where there is no Triton."""
    pytest.importorskip("triton")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
