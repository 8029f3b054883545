"""Every knob says what it cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_dcut.config import DCutConfig
from hf_dcut.cost_table import CostTable


@pytest.mark.parametrize("budget", ["auto", "none", 0.001, 0.25, 1, 1.0])
def test_budgets_that_are_taken(budget: Any) -> None:
    assert DCutConfig(budget=budget).budget == budget


@pytest.mark.parametrize("budget", ["fast", "", 0, 0.0, -0.5, 1.01, 2, float("nan"), None, True, [0.5]])
def test_budgets_that_are_refused(budget: Any) -> None:
    with pytest.raises(ValueError, match=r"budget=.*give 'auto', 'none' or a number in \(0, 1\]"):
        DCutConfig(budget=budget)


@pytest.mark.parametrize("ratios", [(), (0.0,), (0.5, 1.5), (-0.25,), (True,), ("0.5",), (None,)])
def test_ratios_that_are_refused(ratios: Any) -> None:
    with pytest.raises(ValueError, match=r"ratios=.*numbers in \(0, 1\]"):
        DCutConfig(ratios=ratios)


@pytest.mark.parametrize("proposals", ["sample", None, True, 1])
def test_proposals_are_greedy_or_sampled(proposals: Any) -> None:
    with pytest.raises(ValueError, match=f"proposals={proposals!r}: give 'greedy' or 'sampled'"):
        DCutConfig(proposals=proposals)


def test_ratios_become_a_tuple() -> None:
    assert DCutConfig(ratios=[0.5, 1.0]).ratios == (0.5, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["draft_tokens", "max_prefill_tokens", "max_cache_bytes"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "3", True])
def test_counts_that_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}={value!r}: give a positive integer"):
        DCutConfig(**{name: value})


def test_only_some_counts_may_be_none() -> None:
    assert DCutConfig(draft_tokens=None, max_cache_bytes=None).draft_tokens is None
    with pytest.raises(ValueError, match=r"max_prefill_tokens=None: give a positive integer$"):
        DCutConfig(max_prefill_tokens=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["deterministic", "compile"])
@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_switches_are_bools(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name}={value!r}: give True or False"):
        DCutConfig(**{name: value})


@pytest.mark.parametrize("name", ["prepack", "cuda_graphs"])
@pytest.mark.parametrize("value", [None, 1, 0, 1.0, "yes", "True"])
def test_some_are_asked_for_or_not(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}={value!r}: give 'auto', True or False"):
        DCutConfig(**{name: value})


@pytest.mark.parametrize("value", [None, 0, -3, 1.0, "yes", "True"])
def test_a_tree_may_have_a_number_of_nodes(value: Any) -> None:
    assert DCutConfig(draft_tree=31).nodes(7) == 31
    with pytest.raises(ValueError, match=f"draft_tree={value!r}: give 'auto', True, False or a positive integer"):
        DCutConfig(draft_tree=value)


@pytest.mark.parametrize(
    ("options", "depth", "nodes"),
    [({}, 7, 15), ({}, 31, 31), ({"draft_tokens": 3}, 7, 3), ({"draft_tree": True}, 7, 15), ({"draft_tree": 9}, 31, 9)],
)
def test_a_tree_has_as_many_nodes_as_a_chain_has_drafts_but_15_at_least(
    options: dict[str, Any], depth: int, nodes: int
) -> None:
    assert DCutConfig(**options).nodes(depth) == nodes


@pytest.mark.parametrize("name", ["draft_tree", "prepack", "cuda_graphs"])
def test_or_left_to_the_machine(name: str) -> None:
    assert [getattr(DCutConfig(**{name: value}), name) for value in (True, False, "auto")] == [True, False, "auto"]
    assert getattr(DCutConfig(), name) == "auto"


@pytest.mark.parametrize("value", [None, "first", True])
def test_the_budget_of_a_graph_comes_from_one_of_two_places(value: Any) -> None:
    with pytest.raises(ValueError, match=f"cuda_graph_budget={value!r}: give 'last' or 'read'"):
        DCutConfig(cuda_graph_budget=value)


@pytest.mark.parametrize("value", [(), 4, "4", (0,), (2, -1), (1.5,), (True,)])
def test_sizes_of_graphs_that_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"cuda_graph_batch_sizes=.*give one or more positive integers"):
        DCutConfig(cuda_graph_batch_sizes=value)


@pytest.mark.parametrize("value", [None, 3, True, 2.5, ["costs.json"]])
def test_cost_tables_that_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"cost_table=.*give 'auto', 'off', a path or a CostTable"):
        DCutConfig(cost_table=value)


def test_of_takes_what_a_user_may_pass() -> None:
    config = DCutConfig(budget=0.5)
    assert DCutConfig.of(config) is config
    assert DCutConfig.of(True) == DCutConfig()
    assert DCutConfig.of("none") == DCutConfig(budget="none")
    assert DCutConfig.of(0.5) == config
    assert DCutConfig.of(1).budget == 1
    assert DCutConfig.of({"budget": 0.5, "draft_tokens": 3}) == DCutConfig(budget=0.5, draft_tokens=3)


@pytest.mark.parametrize("value", [False, None, [0.5], object()])
def test_of_names_what_it_cannot_take(value: Any) -> None:
    with pytest.raises(TypeError, match=r"dcut=.*give True, a budget"):
        DCutConfig.of(value)


def test_of_knows_bad_budgets() -> None:
    with pytest.raises(ValueError, match="budget='fats'"):
        DCutConfig.of("fats")


def test_unknown_keys_are_named_and_the_known_ones_listed() -> None:
    with pytest.raises(ValueError, match=r"no option 'budgte', 'depth': the options are budget, ratios, proposals"):
        DCutConfig.of({"budgte": 0.5, "depth": 3, "ratios": (0.5,)})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"budget": 0.5, "proposals": "sampled"},
        {"ratios": (0.5, 1.0), "draft_tokens": 3, "deterministic": True},
        {"cuda_graphs": True, "cuda_graph_batch_sizes": (1, 8)},
        {"cuda_graphs": False},
        {"draft_tree": True},
        {"draft_tree": False, "proposals": "sampled"},
        {"cuda_graph_budget": "read", "compile": True},
        {"cost_table": Path("some") / "costs.json", "max_prefill_tokens": 7, "max_cache_bytes": 8},
    ],
)
def test_a_saved_config_comes_back(options: dict[str, Any]) -> None:
    config = DCutConfig(**options)
    saved = json.loads(json.dumps(config.to_dict()))
    assert set(saved) == set(options), "only what differs from the defaults"
    again = DCutConfig.from_dict(saved)
    assert again.to_dict() == config.to_dict()
    for name in ("budget", "ratios", "draft_tree", "draft_tokens"):
        assert getattr(again, name) == getattr(config, name)
    assert Path(str(again.cost_table)) == Path(str(config.cost_table))


def test_a_table_in_memory_cannot_be_saved() -> None:
    config = DCutConfig(cost_table=CostTable.from_rows({1: {0: 1.0}}, 3))
    with pytest.raises(ValueError, match="give cost_table a path instead"):
        config.to_dict()
