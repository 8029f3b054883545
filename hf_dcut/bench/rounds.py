"""Rounds: all methods on the same prompts, so that a slow moment of the machine hits them alike.

Only ratios within a round mean anything: a shared machine's speed drifts by more than methods differ. In a round, our
methods take turns step by step, Transformers' own come before or after them, each as one call. A round is one
block of a cell's prompts; a cell has as many blocks as its prompts make batches, and goes through them again until it
has the rounds that were asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

from hf_dcut.bench import peers
from hf_dcut.bench.lossless import agreement
from hf_dcut.bench.methods import PLAIN, Outcome, Setting
from hf_dcut.bench.running import in_turns, run

# Fewer prompts than these would make a round of a moment.
_LEAST = 4
_WARM_UP_TOKENS = 4
# Whose turn comes after how much.
STEPS, CALLS = "step", "call"


def blocks_of(count: int, batch: int, per_slot: int = 1) -> list[slice]:
    """Returns the blocks of a cell's prompts, as equal as can be.

    Args:
        count: prompts.
        batch: B; a block has at least `per_slot` prompts for each of its slots, if there are so many.
        per_slot: 2 or more keep the batch full for a part of the block.
    """
    number = max(1, count // max(_LEAST, batch * per_slot))
    return [slice(count * i // number, count * (i + 1) // number) for i in range(number)]


def rounds_of(blocks: int, rounds: int) -> int:
    """Returns how many rounds there are: at least those asked for, and every block equally often."""
    return blocks * -(-rounds // blocks)


def warm_up(setting: Setting, prompts: Sequence[list[int]], methods: Sequence[str]) -> dict[str, int | None]:
    """Returns the most memory in use while each method runs one batch, with caches of full size but few tokens.

    What is compiled runs whole, since sizes are compiled in.
    """
    few = min(_WARM_UP_TOKENS, setting.max_new_tokens)
    batch = prompts[: setting.batch]
    return {m: run(m, setting, batch, None if m == peers.COMPILED else few).peak_bytes for m in methods}


def run_rounds(
    setting: Setting,
    prompts: Sequence[list[int]],
    methods: Sequence[str],
    rounds: int,
    per_slot: int = 1,
    done: Container[int] = (),
    progress: Callable[[str], object] = lambda method: None,
    turns: str = CALLS,
) -> Iterator[dict[str, Any]]:
    """Yields the numbers of each round, JSON-able, as it ends. Methods have been warmed up.

    Args:
        setting: of the cell.
        prompts: token ids of each.
        methods: which are compared.
        rounds: how many at least.
        per_slot: as in `blocks_of`.
        done: numbers of rounds that need not run again.
        progress: called with each method that has run.
        turns: "step" lets our methods take turns step by step, and then none has a peak of its own in memory; "call"
            runs each as a whole.
    """
    blocks = blocks_of(len(prompts), setting.batch, per_slot)
    ours = [method for method in methods if turns == STEPS and method not in peers.PEERS]
    for number in range(rounds_of(len(blocks), rounds)):
        if number in done:
            continue
        block = prompts[blocks[number % len(blocks)]]
        # Every round begins at another method, so that none always follows the same neighbour.
        turn = number % len(methods)
        outcomes: dict[str, Outcome] = {}
        for method in (*methods[turn:], *methods[:turn]):
            if method not in outcomes:
                outcomes |= in_turns(ours, setting, block) if method in ours else {method: run(method, setting, block)}
            progress(method)
        yield {
            "round": number,
            "prompts": len(block),
            "prompt_tokens": sum(map(len, block)),
            "methods": {method: _numbers(method, outcomes, setting, block) for method in methods},
            "answers": outcomes[methods[-1]].sequences,
        }


def reference_of(method: str, methods: Container[str], sampled: bool) -> str | None:
    """Returns the method whose answers this one's should equal: plain `generate`, or our plain decoding without it.

    Draws of ours are keyed by request and position, so they equal our plain ones; nobody's equal upstream's.
    """
    if not sampled and peers.GENERATE in methods:
        return peers.GENERATE
    return PLAIN if PLAIN in methods and (not sampled or method not in peers.PEERS) else None


def _numbers(
    method: str, outcomes: dict[str, Outcome], setting: Setting, prompts: Sequence[list[int]]
) -> dict[str, Any]:
    """Returns what a round says of one method."""
    outcome = outcomes[method]
    values: dict[str, Any] = {
        "seconds": outcome.seconds,
        "tokens": outcome.tokens,
        "first_token": outcome.first_token,
        "peak_bytes": outcome.peak_bytes,
        "pulse": outcome.pulse,
    }
    reference = reference_of(method, outcomes, setting.temperature > 0)
    if reference is not None:
        theirs = outcomes[reference].sequences
        if setting.temperature > 0:
            values["equal"] = sum(a == b for a, b in zip(outcome.sequences, theirs, strict=True))
        else:
            values |= agreement(setting.model, prompts, outcome.sequences, theirs).to_dict()
    if outcome.stats is not None:
        values["stats"] = {k: v for k, v in outcome.stats.to_dict().items() if k != "finish_reasons"}
    return values
