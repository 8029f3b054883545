"""`compiling`: the attention-free parts of decoder layers, fused by torch.compile for the time of a call.

A step's rows differ in number from one to the next, and attention is switched on for single forwards by a context
variable that Dynamo does not trace. So what is compiled lies between: norms and MLPs, which take any number of rows.
One piece of code serves a part's kind in all layers and all T but 1, which has one of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from hf_dcut.config import DCutConfig
from hf_dcut.drafters.base import Drafter
from hf_dcut.swapping import Swap
from hf_dcut.target import Target, decoder_layers

BACKEND = "inductor"


@contextmanager
def compiling(config: DCutConfig, target: Target, drafter: Drafter | None) -> Iterator[None]:
    """Runs norms and MLPs of target and drafter compiled, where the config asks for it; they are as before on leaving.

    Raises:
        ValueError: there is nothing to compile, or several processes share the target.
    """
    parts: list[nn.Module] = []
    if config.compile:
        name = type(target.model).__name__
        if target.ranks.size > 1:
            raise ValueError(f"dcut compile=True: {name} is split over several processes. Leave compile out")
        parts = parts_of(decoder_layers(target.model) or ())
        if not parts:
            raise ValueError(
                f"dcut compile=True: {name} shows no norms or MLPs to compile in the children of get_decoder().layers. "
                "Leave compile out"
            )
        parts += parts_of(drafter.layers if drafter is not None else ())
    with compiled(parts):
        yield


def parts_of(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Returns the children of decoder layers in which torch can fuse something: norms and MLPs.

    Not attention and recurrence, which know the number of their layer to find its cache; nor experts, which look on the
    host at who is asked; nor torch's own modules, which are one kernel each.
    """
    return [part for layer in layers for part in layer.children() if _fuses(part)]


def _fuses(part: nn.Module) -> bool:
    kind = type(part)
    own = not kind.__module__.startswith("torch.nn") and kind.forward is not nn.Module.forward
    inside = any(hasattr(module, name) for module in part.modules() for name in ("layer_idx", "experts"))
    return own and not inside and any(True for _ in part.parameters())


def _compile(part: nn.Module) -> None:
    part.compile(backend=BACKEND, dynamic=True)


def _restore(part: nn.Module) -> None:
    del part._compiled_call_impl


# Runs parts compiled, but those that the user compiled; code that was made once stays for later calls.
compiled = Swap(lambda part: part._compiled_call_impl is None, _compile, _restore)
