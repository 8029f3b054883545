"""What happens when a visitor does something. Each visitor has a `Visitor` of their own that nobody else can reach.

Handlers return or yield views: a value for each named part of the page that changes. Those that use the model wait in
one queue; stopping does not.
"""

from __future__ import annotations

import json
import random
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from hf_dcut.app import panels, plots, views
from hf_dcut.app.models import Models
from hf_dcut.app.race import Race
from hf_dcut.app.run import Run
from hf_dcut.app.settings import Limits, Settings, join_prompts, split_prompts
from hf_dcut.app.trace import Trace
from hf_dcut.app.views import View
from hf_dcut.bench.prompts import read_prompts
from hf_dcut.wording import counted

_INTERRUPTED = "That did not work: the queue is full, or something failed on the server. Try again in a moment."


@dataclass
class Visitor:
    """What one browser tab is doing.

    Attributes:
        run: what is shown, running, paused or ended.
        race: the side-by-side run that is shown.
        stopping: whether Stop was pressed since the last start.
        busy: whether a handler is at work, or waits in the queue to be.
    """

    run: Run | None = None
    race: Race | None = None
    stopping: bool = False
    busy: bool = False

    @property
    def paused(self) -> Run | None:
        """The run that can go on; None when there is none."""
        return self.run if self.run and not self.run.closed and not self.run.done else None

    def buttons(self) -> View:
        """Returns which buttons can be pressed now."""
        return views.buttons(self.busy, self.paused is not None)

    def close(self) -> None:
        """Ends what is running and gives its memory back: the tab is gone, or something new begins."""
        self.stopping = True
        if self.run:
            self.run.close()


class Handlers:
    """The page's handlers.

    Args:
        models: loaded, or on their way.
        limits: of the page.
    """

    def __init__(self, models: Models, limits: Limits):
        self.models, self.limits = models, limits
        self._open: list[Run] = []
        self._lock = threading.Lock()
        self._files = tempfile.TemporaryDirectory(prefix="hf-dcut-demo-")

    def chip(self) -> tuple[str, bool]:
        """Returns the words on the models' state, and whether they will still change."""
        if self.models.ready or self.models.error:
            words = self.models.error or f"{self.models.name} is ready"
            return panels.status(words, "error" if self.models.error else "done"), False
        return panels.status(f"{self.models.name}: {self.models.stage}, {self.models.seconds:.0f} s", "busy"), True

    def draw(self, name: str, count: float | None) -> str:
        """Returns prompts drawn from a set, as the prompt field shows them."""
        pool = list(dict.fromkeys(read_prompts(name)))
        wanted = self.limits.most if count is None else int(count)
        return join_prompts(random.sample(pool, min(wanted, self.limits.most, len(pool))))

    def begin(self, visitor: Visitor) -> View:
        """Takes the visitor's start; the work itself waits in the queue."""
        visitor.stopping, visitor.busy = False, True
        return {"status": panels.status("Waiting for its turn", "busy"), **visitor.buttons()}

    def settle(self, visitor: Visitor) -> View:
        """Sets the buttons after the work, however it ended."""
        visitor.busy = False
        return visitor.buttons()

    def interrupted(self, visitor: Visitor) -> View:
        """Sets the buttons after work that never began, or broke off, and says so."""
        return {"status": panels.status(_INTERRUPTED, "error"), **self.settle(visitor)}

    def run(self, visitor: Visitor, *choices: Any) -> Iterator[View]:
        """Yields pictures of a run from its start, or from where it was paused, to its end."""
        try:
            yield from self._wait(visitor)
            run = visitor.paused or (yield from self._new_run(visitor, choices))
            yield from self._play(visitor, run)
        except (ValueError, MemoryError) as error:
            yield self._failed(visitor, error)

    def step(self, visitor: Visitor, *choices: Any) -> Iterator[View]:
        """Yields the picture after one step of the paused run, or after the first of a new one."""
        try:
            yield from self._wait(visitor)
            run = visitor.paused or (yield from self._new_run(visitor, choices))
            before = len(run.trace.steps)
            while len(run.trace.steps) == before and not run.done and not visitor.stopping:
                run.step()
            if run.done or visitor.stopping:
                yield self._end(visitor, run)
            else:
                words = f"Paused after step {len(run.trace.steps)}. Step on, run on, or stop to start over."
                yield {
                    **views.frame(run.trace, words, "idle"),
                    **views.lens(run.trace, None),
                    "drafts": gr.Accordion(open=True),
                }
        except (ValueError, MemoryError) as error:
            yield self._failed(visitor, error)

    def compare(self, visitor: Visitor, *choices: Any) -> Iterator[View]:
        """Yields pictures of three methods on the same prompts."""
        try:
            yield from self._wait(visitor)
            settings = self.settings(*choices)
            settings.check(self.limits)
            visitor.close()
            visitor.stopping = False
            yield {"status": panels.status("Preparing three runs", "busy"), "tabs": gr.Tabs(selected="race")}
            visitor.race = Race(self.models, settings, self.limits)
            yield from self._play_race(visitor, visitor.race)
        except (ValueError, MemoryError) as error:
            yield self._failed(visitor, error)

    def stop(self, visitor: Visitor) -> View:
        """Stops what runs, at its next step, or drops what is paused."""
        visitor.stopping = True
        if visitor.busy:
            return {"status": panels.status("Stopping", "busy")}
        if visitor.run is None:
            return visitor.buttons()
        return {**self._end(visitor, visitor.run), **visitor.buttons()}

    def look(self, visitor: Visitor, number: float) -> View:
        """Returns one step of the visitor's run under the lens, with its cost curve."""
        if visitor.run is None or not visitor.run.trace.steps:
            return {}
        index = min(max(int(number), 1), len(visitor.run.trace.steps)) - 1
        return views.step(visitor.run.trace, index)

    def settings(
        self,
        prompts: str,
        drafter: str,
        budget: str,
        share: float,
        new_tokens: int,
        sample: bool,
        temperature: float,
        top_k: int,
        top_p: float,
        seed: int,
    ) -> Settings:
        """Returns what the fields of the page say, in their order there."""
        return Settings(
            prompts=split_prompts(prompts),
            drafter=drafter,
            budget="auto" if budget == "auto" else share / 100,
            new_tokens=int(new_tokens),
            sample=sample,
            temperature=temperature,
            top_k=_whole(top_k),
            top_p=top_p,
            seed=_whole(seed),
        )

    def _wait(self, visitor: Visitor) -> Iterator[View]:
        """Yields words for the visitor until the models are there."""
        while not visitor.stopping and not self.models.wait(0.3):
            yield {"status": panels.status(f"Waiting for the models: {self.models.stage}", "busy")}
        if visitor.stopping:
            raise ValueError("stopped before it began")

    def _new_run(self, visitor: Visitor, choices: tuple[Any, ...]) -> Generator[View, None, Run]:
        """Yields words while a run is opened, and returns it."""
        run = Run(self.models, self.settings(*choices), self.limits)
        visitor.close()
        visitor.run, visitor.stopping = run, False
        self._make_room(run)
        words = f"Preparing {len(run.requests)} requests; the first time, steps of so many are measured"
        yield {**views.empty(run.trace), "status": panels.status(words, "busy"), "tabs": gr.Tabs(selected="run")}
        run.open()
        return run

    def _make_room(self, run: Run) -> None:
        """Closes the run that was opened first where too many are paused."""
        with self._lock:
            self._open = [other for other in self._open if not other.closed] + [run]
            surplus = self._open[: -self.limits.open_runs]
        for other in surplus:
            other.close()

    def _play(self, visitor: Visitor, run: Run) -> Iterator[View]:
        begin = shown = time.perf_counter()
        words = f"Running {len(run.requests)} requests"
        try:
            while not run.done and not visitor.stopping:
                run.step()
                now = time.perf_counter()
                if now - begin > self.limits.seconds:
                    break
                if now - shown >= views.pause(run.trace):
                    shown = now
                    yield views.frame(run.trace, words)
            yield self._end(visitor, run)
        finally:
            run.close()

    def _end(self, visitor: Visitor, run: Run) -> View:
        """Returns the last picture of a run, closed, with its files."""
        run.close()
        trace = run.trace
        share = f"{trace.cut_share:.0%} of the drafts never verified"
        if run.done:
            words, kind = f"Finished: {trace.tokens} tokens, {trace.tokens_per_second:.1f} a second, {share}.", "done"
        elif visitor.stopping:
            words, kind = (
                f"Stopped after {counted(len(trace.steps), 'step')}: {counted(trace.tokens, 'token')}.",
                "idle",
            )
        else:
            words, kind = f"Stopped after {self.limits.seconds:g} seconds, so that others get their turn.", "idle"
        plot = [plots.heat_map(trace), plots.cost_curve(trace, trace.telling)]
        return {**views.frame(trace, words, kind), **views.lens(trace, trace.telling), **self._save([trace], plot)}

    def _play_race(self, visitor: Visitor, race: Race) -> Iterator[View]:
        begin = shown = time.perf_counter()
        steps = race.steps()
        why = ""
        for trace in steps:
            now = time.perf_counter()
            if visitor.stopping or now - begin > self.limits.seconds:
                why = "Stopped" if visitor.stopping else f"Stopped after {self.limits.seconds:g} seconds"
                break
            if now - shown >= 2 * views.pause(trace):
                shown = now
                words = f"Side by side: {trace.method}, {len(race.traces)} of 3"
                yield {"status": panels.status(words, "busy"), **views.race(race, "running")}
        steps.close()
        words = why or "Finished: three methods, the same prompts."
        plot = [plots.race(race.traces), *(plots.heat_map(trace) for trace in race.traces)]
        yield {
            "status": panels.status(words, "idle" if why else "done"),
            **views.race(race, "stopped" if why else "finished"),
            **self._save(race.traces, plot),
        }

    def _failed(self, visitor: Visitor, error: Exception) -> View:
        visitor.close()
        stopped = str(error).startswith("stopped")
        return {"status": panels.status(_sentence(str(error)), "idle" if stopped else "error")}

    def _save(self, traces: list[Trace], plot: list[str]) -> View:
        """Returns the download buttons with their files, which lie where only this visitor is sent."""
        folder = Path(tempfile.mkdtemp(dir=self._files.name))
        content, image = folder / "dcut-trace.json", folder / "dcut-plots.svg"
        content.write_text(json.dumps([trace.to_dict() for trace in traces], indent=1, ensure_ascii=False))
        image.write_text(plots.sheet(plot))
        return {
            "trace_file": gr.DownloadButton(value=str(content), interactive=True),
            "plot_file": gr.DownloadButton(value=str(image), interactive=True),
        }


def _whole(value: float | None) -> Any:
    """Returns a number field's value as an integer; None, an emptied field, is left for the check of its range."""
    return None if value is None else int(value)


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:] + ("" if words.endswith(".") else ".")
