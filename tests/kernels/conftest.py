"""What the kernels' tests share: the device fused kernels run on, a GPU or Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where fused kernels run here."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
