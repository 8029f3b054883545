"""`Swap`: modules that run in another way for the time of a call, and are as before after it.

Calls may overlap, in threads or in generators that are read in turns. The first one changes a module, the last one
changes it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Lock
from weakref import WeakKeyDictionary

from torch import nn


class Swap:
    """One way of changing modules.

    Args:
        free: whether nobody else has changed a module; one that somebody has is left alone.
        change: changes it.
        restore: changes it back.
    """

    def __init__(
        self,
        free: Callable[[nn.Module], bool],
        change: Callable[[nn.Module], None],
        restore: Callable[[nn.Module], None],
    ):
        self._free, self._change, self._restore = free, change, restore
        # How many calls run each module changed.
        self._calls: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self._lock = Lock()

    @contextmanager
    def __call__(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Runs these modules changed, in all threads, and lets go of them on leaving."""
        taken = [module for module in modules if self._take(module)]
        try:
            yield
        finally:
            for module in taken:
                self._leave(module)

    def _take(self, module: nn.Module) -> bool:
        """Returns whether a module runs changed for the calls that are counted, and counts one more."""
        with self._lock:
            if module not in self._calls:
                if not self._free(module):
                    return False
                self._change(module)
            self._calls[module] = self._calls.get(module, 0) + 1
            return True

    def _leave(self, module: nn.Module) -> None:
        """Counts one call less; after the last one the module is as it was."""
        with self._lock:
            self._calls[module] -= 1
            if not self._calls[module]:
                del self._calls[module]
                self._restore(module)
