"""Parts in a process of their own: one that crashes, raises or hangs fails alone, and what is left out is told."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import pytest

from hf_dcut.bench.gpu.clock import Clock
from hf_dcut.bench.gpu.rig import Rig
from hf_dcut.bench.gpu.supervisor import Part, results, send, supervise

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the workers of these tests are forked")


def serve(connection: Connection, names: Sequence[str]) -> None:
    """Does what the name of each part says."""

    def found() -> Iterator[tuple[str, dict[str, Any]]]:
        for name in names:
            if name == "crash":
                os._exit(7)
            if name == "hang":
                time.sleep(60)
            if name == "raise":
                raise RuntimeError("no kernel image")
            yield name, {"state": "done", "process": os.getpid()}

    send(connection, found())


def run(names: list[str], seconds: float = 30.0, **ends: float) -> dict[str, dict[str, Any]]:
    now = time.monotonic()
    by = {name: now + ends.get(name, seconds) for name in names}
    return dict(supervise(names, by, serve, multiprocessing.get_context("fork"), grace=0.2))


def test_one_worker_does_what_goes_well() -> None:
    found = run(["one", "two", "three"])
    assert list(found) == ["one", "two", "three"]
    assert len({result["process"] for result in found.values()}) == 1
    assert os.getpid() != found["one"]["process"]


@pytest.mark.parametrize(
    ("name", "reason"), [("crash", "its process ended with 7"), ("raise", "RuntimeError: no kernel image")]
)
def test_a_part_that_ends_its_process_fails_alone(name: str, reason: str) -> None:
    found = run(["one", name, "two"])
    assert found[name] == {"state": "failed", "reason": reason, "passed": False}
    assert (found["one"]["state"], found["two"]["state"]) == ("done", "done")
    assert found["one"]["process"] != found["two"]["process"]


def test_a_part_that_hangs_is_stopped() -> None:
    begin = time.monotonic()
    found = run(["one", "hang", "two"], hang=0.5)
    assert found["hang"]["reason"] == "took too long and was stopped"
    assert found["two"]["state"] == "done"
    assert time.monotonic() - begin < 20


def test_nothing_starts_after_its_end() -> None:
    found = run(["one", "two"], one=-1.0, two=-1.0)
    assert [result["state"] for result in found.values()] == ["skipped", "skipped"]
    assert found["one"]["reason"] == "no time: 0 s left in this part"


def test_a_part_whose_end_is_over_is_skipped_with_the_reason() -> None:
    part = Part("late", 1.0, lambda rig, clock: {"passed": True})
    now = time.monotonic()
    (early,) = results([part], Rig(tiny=True), {"late": now + 60})
    (late,) = results([part], Rig(tiny=True), {"late": now - 1})
    assert early[1].pop("seconds") >= 0
    assert early == ("late", {"state": "done", "passed": True})
    assert (late[1]["state"], late[1]["reason"]) == ("skipped", "no time: 0 s left in this part")


def test_a_clock_says_why() -> None:
    assert Clock().late() is None
    assert Clock(time.monotonic() + 10).late() is None
    assert Clock(time.monotonic() + 10.4).late(60) == "no time: 10 s left in this part, 60 s needed"
