"""Views: what the named parts of the page become in each state of a run. A part that is left out stays as it is."""

from __future__ import annotations

from typing import Any

import gradio as gr

from hf_dcut.app import panels, plots
from hf_dcut.app.race import Race
from hf_dcut.app.trace import Trace

View = dict[str, Any]

# Seconds between two pictures of a running batch, and more for each cell of the map: smooth to the eye, and large
# batches do not flood the browser.
_FRAME = 0.15
_FRAME_A_CELL = 5e-5


def frame(trace: Trace, words: str, kind: str = "busy") -> View:
    """Returns the parts of the page that change while a batch runs."""
    return {
        "status": panels.status(words, kind),
        "numbers": panels.numbers(trace),
        "heat": panels.scrolling(plots.heat_map(trace)),
        "curve": panels.scrolling(plots.cost_curve(trace)),
        "ranking": panels.ranking(trace, None),
        "answers": panels.answers(trace),
    }


def pause(trace: Trace) -> float:
    """Returns seconds until the next picture."""
    return _FRAME + _FRAME_A_CELL * len(trace.answers) * len(trace.steps)


def empty(trace: Trace) -> View:
    """Returns the page at the start of a run: nothing of the last one is left."""
    return {
        **frame(trace, ""),
        "lens": panels.lens(None, None),
        "number": gr.Slider(maximum=2, value=1, interactive=False),
        "trace_file": gr.DownloadButton(value=None, interactive=False),
        "plot_file": gr.DownloadButton(value=None, interactive=False),
    }


def step(trace: Trace, number: int | None) -> View:
    """Returns the parts of the page that show one step; the latest when `number` is None."""
    return {
        "curve": panels.scrolling(plots.cost_curve(trace, number)),
        "ranking": panels.ranking(trace, number),
        "lens": panels.lens(trace, number),
    }


def lens(trace: Trace, number: int | None) -> View:
    """Returns one step, and the slider set to it."""
    count = len(trace.steps)
    at = count if number is None else number + 1
    return {**step(trace, number), "number": gr.Slider(maximum=max(count, 2), value=max(at, 1), interactive=count > 1)}


def race(shown: Race, state: str) -> View:
    """Returns the side-by-side part; state is "running", "stopped" or "finished"."""
    differences = shown.differences() if state == "finished" else None
    return {"race": panels.race(shown.traces, differences, state), "race_maps": panels.race_maps(shown.traces)}


def buttons(busy: bool, paused: bool) -> View:
    """Returns which buttons can be pressed.

    Args:
        busy: whether a handler is at work for the visitor, or waits to be.
        paused: whether there is a run that can go on.
    """
    idle = not busy
    return {
        "run_button": gr.Button("Run on" if paused and idle else "Run", interactive=idle),
        "step_button": gr.Button(interactive=idle),
        "compare_button": gr.Button(interactive=idle),
        "stop_button": gr.Button(interactive=busy or paused),
    }
