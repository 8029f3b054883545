"""The names of drafters that commands take: a folder or Hub id, "lookup", or "NAME+lookup" for both at once."""

from __future__ import annotations

from collections.abc import Callable

from hf_dcut.drafters.base import Drafter
from hf_dcut.drafters.best_of import BestOf
from hf_dcut.drafters.prompt_lookup import PromptLookupDrafter

LOOKUP = "lookup"
_BESIDE = f"+{LOOKUP}"


def source_of(name: str) -> str | None:
    """Returns what is to be loaded for a drafter of this name; None for "lookup", which is made of nothing.

    Raises:
        ValueError: an empty name, nothing before "+lookup", or lookup twice.
    """
    source = name.removesuffix(_BESIDE)
    if not source.strip() or source.endswith(_BESIDE) or (source == LOOKUP and source != name):
        raise ValueError(f"drafter {name!r}: give a folder or Hub id, or {LOOKUP}, or both as FOLDER_OR_ID{_BESIDE}")
    return None if source == LOOKUP else source


def named_drafter(name: str, load: Callable[[str], Drafter]) -> Drafter:
    """Returns the drafter of this name; of "NAME+lookup" a `BestOf` of both.

    Args:
        name: as above.
        load: makes the drafter of what `source_of` returns.

    Raises:
        ValueError: as of `source_of`, and what `load` raises.
    """
    source = source_of(name)
    if source is None:
        return PromptLookupDrafter()
    drafter = load(source)
    return BestOf([drafter, PromptLookupDrafter()]) if name.endswith(_BESIDE) else drafter
