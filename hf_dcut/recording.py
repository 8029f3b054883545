"""`Recorder`: makes of a function on the device one that does the same again in a single launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Recorder(Protocol):
    """Records what a function does on the device, so that it can be done again."""

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        """Returns a function that does the same to the same memory, and returns the same tensors, filled anew."""

    def bytes(self) -> int:
        """Returns the memory that the device holds by now."""


class CudaRecorder:
    """Records CUDA graphs into one memory pool.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        """Returns the replay. What a first run allocates, compiles or tunes, it does before the recording."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            for _ in range(2):
                run()
        current.wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            result = run()

        def replay() -> T:
            graph.replay()
            return result

        return replay

    def bytes(self) -> int:
        """Returns what the allocator has taken from the device."""
        return torch.cuda.memory_reserved(self.device)


def recorder_for(device: torch.device) -> Recorder | None:
    """Returns what records steps on a device; None where there are no graphs."""
    return CudaRecorder(device) if device.type == "cuda" else None
