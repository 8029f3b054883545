"""The names of drafters that commands take: a folder or Hub id, "lookup", "suffix", or several joined by "+"."""

from __future__ import annotations

from collections.abc import Callable

from hf_dcut.drafters.base import Drafter
from hf_dcut.drafters.best_of import BestOf
from hf_dcut.drafters.prompt_lookup import PromptLookupDrafter
from hf_dcut.drafters.suffix import SuffixDrafter

# Drafters that are made of nothing.
MADE: dict[str, Callable[[], Drafter]] = {"lookup": PromptLookupDrafter, "suffix": SuffixDrafter}


def source_of(name: str) -> str | None:
    """Returns what is to be loaded for a drafter of this name; None where all of it is made of nothing.

    Raises:
        ValueError: an empty name, nothing before the first "+", or one drafter twice.
    """
    first, _ = _parts(name)
    return None if first in MADE else first


def named_drafter(name: str, load: Callable[[str], Drafter]) -> Drafter:
    """Returns the drafter of this name; of several joined by "+" a `BestOf`.

    Args:
        name: such as "owner/drafter", "lookup" or "owner/drafter+lookup+suffix".
        load: makes the drafter of what `source_of` returns.

    Raises:
        ValueError: as of `source_of`, and what `load` raises.
    """
    first, others = _parts(name)
    drafters = [MADE[first]() if first in MADE else load(first), *(MADE[other]() for other in others)]
    return drafters[0] if len(drafters) == 1 else BestOf(drafters)


def _parts(name: str) -> tuple[str, list[str]]:
    """Returns the first drafter of a name, which may have "+" within itself, and those beside it."""
    first, others = name, list[str]()
    while (word := first.rpartition("+")[2]) in MADE and "+" in first:
        first = first.removesuffix(f"+{word}")
        others.insert(0, word)
    if not first.strip() or len({first, *others}) <= len(others):
        made, several = " or ".join(MADE), "+".join(["FOLDER_OR_ID", *MADE])
        raise ValueError(f"drafter {name!r}: give a folder or Hub id, {made}, or several as {several}")
    return first, others
