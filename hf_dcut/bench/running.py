"""Methods at work: one by itself, or several of ours in turns, a step of each.

A shared machine's speed moves from second to second. Engines that take turns meet the same of it: the next step is
always that of the method which is behind, and each is charged its own steps only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch

from hf_dcut.assembly import open_engine
from hf_dcut.bench import peers
from hf_dcut.bench.machine import peak_memory
from hf_dcut.bench.methods import SHORT, TREE, Outcome, Setting, drafts_of, requests_of
from hf_dcut.bench.policies import limited, rule_of
from hf_dcut.bench.pulse import Pulse
from hf_dcut.config import DCutConfig
from hf_dcut.drafters.wrapping import Wrapped
from hf_dcut.prepacking import prepacked


def run(method: str, setting: Setting, prompts: Sequence[list[int]], tokens: int | None = None) -> Outcome:
    """Returns what a method makes of the prompts, timed, with the most memory that was in use.

    Args:
        method: a peer of `peers.PEERS`, or as in `policies.rule_of`, with "short-" before it for a shorter block,
            or "tree-" for draft trees.
        setting: of the cell.
        prompts: token ids of each.
        tokens: new tokens of each, where that is fewer than the setting's, for which there is room all the same.
    """
    with peak_memory(setting.model.device) as peak:
        if method in peers.PEERS:
            outcome = _run_peer(method, setting, prompts, tokens)
        else:
            outcome = in_turns([method], setting, prompts, tokens)[method]
    outcome.peak_bytes = peak[0]
    return outcome


def in_turns(
    methods: Sequence[str], setting: Setting, prompts: Sequence[list[int]], tokens: int | None = None
) -> dict[str, Outcome]:
    """Returns what each of some methods of ours makes of the prompts, all of them progressing alike.

    Args:
        methods, setting, prompts, tokens: as for `run`.
    """
    with ExitStack() as stack:
        # Weights are laid out once for all; alone, each would have had to.
        begin = time.perf_counter()
        stack.enter_context(prepacked([setting.model, *setting.drafter.networks], "auto"))
        packing = time.perf_counter() - begin
        runs = {method: stack.enter_context(_Run(method, setting, prompts, tokens)) for method in methods}
        for one in runs.values():
            one.seconds += packing
        pulse = Pulse(setting.model)
        while busy := [one for one in runs.values() if one.engine.busy]:
            pulse.beat()
            min(busy, key=lambda one: one.engine.stats.new_tokens).step()
    return {method: one.outcome(pulse.seconds) for method, one in runs.items()}


class _Run:
    """One of our methods on some prompts, as a context: a step when it is asked for one.

    Attributes:
        engine: of the method.
        seconds: that it has taken, setting up included.
    """

    def __init__(self, method: str, setting: Setting, prompts: Sequence[list[int]], tokens: int | None):
        drafter, costs = setting.drafter, setting.costs
        tree = method.startswith(TREE)
        if method.startswith(SHORT):
            assert setting.short is not None
            drafter, costs = setting.short
        elif tree:
            costs = setting.tree_costs
        budget, policy = rule_of(method.removeprefix(SHORT).removeprefix(TREE))
        depth = setting.draft_tokens or drafter.draft_tokens
        if policy is not None:
            drafter = Wrapped(drafter, limited(policy, depth))
        table = "off" if costs is None else costs
        config = DCutConfig(budget=budget, cost_table=table, **drafts_of(drafter, tree, depth))
        slots, widest = min(setting.batch, len(prompts)), max(map(len, prompts))
        proposer, longest = None if budget == "none" else drafter, widest + setting.max_new_tokens
        self._opened = open_engine(setting.model, proposer, config, slots, widest, longest)
        self._device, self.requests = setting.model.device, requests_of(setting, prompts, tokens)
        self.seconds, self._first = 0.0, dict.fromkeys(range(slots), 0.0)

    def __enter__(self) -> Self:
        begin = time.perf_counter()
        self.engine = self._opened.__enter__()
        for request in self.requests:
            self.engine.roster.add(request)
        self.seconds += time.perf_counter() - begin
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)

    def step(self) -> None:
        """Takes a step, and waits for the device."""
        begin = time.perf_counter()
        self.engine.step()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.seconds += time.perf_counter() - begin
        for index, known in self._first.items():
            if not known and self.requests[index].tokens:
                self._first[index] = self.seconds

    def outcome(self, pulse: float | None) -> Outcome:
        """Returns what came of it, with the machine's pulse meanwhile."""
        first, said = statistics.median(self._first.values()), [request.tokens for request in self.requests]
        return Outcome(self.seconds, said, first, None, self.engine.stats, pulse)


def _run_peer(method: str, setting: Setting, prompts: Sequence[list[int]], tokens: int | None) -> Outcome:
    """Returns what a method of Transformers makes of the prompts."""
    new = setting.max_new_tokens if tokens is None else tokens
    options = peers.Options(setting.batch, new, setting.temperature, setting.width, setting.assistant)
    seconds, sequences, first = peers.run(method, setting.model, prompts, options)
    return Outcome(seconds, [_until(setting.eos, said) for said in sequences], first, None, None)


def _until(ends: frozenset[int], tokens: Sequence[int]) -> list[int]:
    """Returns the tokens up to and with the first that ends the answer."""
    return list(tokens[: next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))])
