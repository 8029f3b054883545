"""What the visitor sees: the components, their places, and which handler each of them calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any

import gradio as gr

from hf_dcut.app import panels
from hf_dcut.app.handlers import Handlers, Visitor
from hf_dcut.app.models import Models
from hf_dcut.app.settings import Limits, join_prompts
from hf_dcut.app.views import View
from hf_dcut.bench.prompts import read_prompts, shipped

_TITLE = "D-cut, step by step"
_INTRO = (
    "<p>A small <b>drafter</b> guesses the next tokens of every request at once. <b>D-cut</b> ranks all guesses of the "
    "batch by the chance that they survive and keeps only those worth their time; the <b>target</b> verifies these in "
    "one pass. The text is exactly what the target would have written alone.</p>"
)
_MAP = (
    "Each row will be a request and each column a step. A full column is everything the drafter proposed; D-cut leaves "
    "out the outlined part, the target confirms the orange part."
)
_CURVE = "Verifying more drafts may bring more tokens, but it takes longer. The curve shows where it stops paying."

# Where the page is one column, the fields fill the screen: what happens is further down.
_TO_STATUS = """(...values) => {
  if (innerWidth < 1024) document.querySelector("#status").scrollIntoView({ behavior: "smooth" });
  return values;
}"""


def build(models: Models, limits: Limits | None = None) -> gr.Blocks:
    """Returns the page; `launch_options` has its look.

    Args:
        models: need not be loaded yet.
        limits: of what a visitor may ask for; the defaults when None.
    """
    limits = limits or Limits()
    handlers = Handlers(models, limits)
    with gr.Blocks(title=_TITLE, analytics_enabled=False, fill_width=True, delete_cache=(600, 3600)) as page:
        visitor = gr.State(Visitor(), delete_callback=Visitor.close)
        with gr.Row(elem_classes="dcut-head"):
            gr.HTML(f'<div class="dcut head"><h1>{_TITLE}</h1>{_INTRO}</div>')
            chip = gr.HTML(handlers.chip()[0], elem_id="chip")
        with gr.Row(elem_classes="dcut-body"):
            with gr.Column(scale=1, min_width=320, elem_classes="dcut-controls"):
                parts = _actions()
                choices, drawing = _controls(models, limits)
            with gr.Column(scale=4, min_width=320, elem_classes="dcut-main"):
                parts |= _stage()
        _wire(page, handlers, visitor, chip, choices, drawing, parts)
    page.queue(max_size=limits.waiting, default_concurrency_limit=1)
    return page


def launch_options() -> dict[str, Any]:
    """Returns what `Blocks.launch` needs for the page's look: nothing of it comes from the network."""
    sans = ["system-ui", "Segoe UI", "Roboto", "Liberation Sans", "sans-serif"]
    mono = ["ui-monospace", "Consolas", "Liberation Mono", "monospace"]
    theme = gr.themes.Base(primary_hue="orange", neutral_hue="slate", radius_size="lg", font=sans, font_mono=mono)
    theme = theme.set(
        button_primary_background_fill="#b45309",
        button_primary_background_fill_hover="#92400e",
        button_primary_text_color="white",
        button_primary_background_fill_dark="#f59e0b",
        button_primary_background_fill_hover_dark="#fbbf24",
        button_primary_text_color_dark="#1b1203",
        slider_color="#1a62ad",
        slider_color_dark="#86bdf5",
    )
    sheets = [files("hf_dcut.app").joinpath(name).read_text() for name in ("plots.css", "page.css")]
    return {"theme": theme, "css": "\n".join(sheets), "footer_links": [], "show_error": True, "ssr_mode": False}


def _controls(models: Models, limits: Limits) -> tuple[list[Any], list[Any]]:
    """Returns the fields that `Handlers.settings` reads, in its order, and those that draw prompts."""
    with gr.Group():
        first = join_prompts(read_prompts("gsm8k")[: models.first_batch])
        prompts = gr.Textbox(
            first,
            label=f"Prompts, {limits.fewest} to {limits.most}",
            info="One a line. An empty line between them allows several lines each.",
            lines=6,
            max_lines=10,
            elem_id="prompts",
        )
        with gr.Row(equal_height=True):
            name = gr.Dropdown(shipped(), value="gsm8k", label="Benchmark set", min_width=120)
            count = gr.Number(
                models.first_batch,
                label="How many",
                precision=0,
                minimum=limits.fewest,
                maximum=limits.most,
                min_width=90,
                elem_id="count",
            )
        draw = gr.Button("Draw prompts from the set", size="sm", elem_id="draw")
    with gr.Group():
        drafter = gr.Dropdown(models.titles(), value=models.drafters[0], label="Drafter", elem_id="drafter")
        budget = gr.Radio(
            [("Auto: decided at every step", "auto"), ("Fixed share", "fixed")],
            value="auto",
            label="Budget",
            elem_id="budget",
        )
        share = gr.Slider(5, 100, 50, step=5, label="Positions to verify, %", visible=False, elem_id="share")
        new_tokens = gr.Slider(
            8, limits.new_tokens, min(64, limits.new_tokens), step=8, label="New tokens a request", elem_id="new-tokens"
        )
    with gr.Accordion("Sampling", open=False):
        sample = gr.Checkbox(False, label="Draw tokens instead of taking the likeliest", elem_id="sample")
        temperature = gr.Slider(0.1, 2, 0.7, step=0.1, label="Temperature")
        top_p = gr.Slider(0.05, 1, 1, step=0.05, label="Top-p")
        with gr.Row():
            top_k = gr.Number(0, label="Top-k (0: off)", precision=0, minimum=0, min_width=100)
            seed = gr.Number(0, label="Seed", precision=0, minimum=0, min_width=100)
    budget.change(lambda kind: gr.Slider(visible=kind == "fixed"), budget, share, queue=False, api_visibility="private")
    fields = [prompts, drafter, budget, share, new_tokens, sample, temperature, top_k, top_p, seed]
    return fields, [draw, name, count, prompts]


def _actions() -> dict[str, Any]:
    """Returns the buttons that start and stop."""
    with gr.Row(equal_height=True, elem_classes="dcut-actions"):
        run = gr.Button("Run", variant="primary", elem_id="run", min_width=80)
        step = gr.Button("One step", elem_id="step", min_width=80)
        stop = gr.Button("Stop", variant="stop", interactive=False, elem_id="stop", min_width=80)
    compare = gr.Button("Side by side, three methods", elem_id="compare")
    return {"run_button": run, "step_button": step, "stop_button": stop, "compare_button": compare}


def _stage() -> dict[str, Any]:
    """Returns the parts that show a run."""
    parts: dict[str, Any] = {}
    idle = "Press Run to watch a batch being generated, or One step to go through it by hand."
    parts["status"] = gr.HTML(panels.status(idle), elem_id="status")
    with gr.Tabs(selected="run") as tabs:
        with gr.Tab("One run", id="run"):
            parts["numbers"] = gr.HTML(panels.numbers(None), elem_id="numbers")
            with gr.Column(elem_classes="card"):
                gr.HTML(f'<div class="dcut bar"><h2>What was drafted, kept and accepted</h2>{panels.legend()}</div>')
                parts["heat"] = gr.HTML(panels.hint(_MAP), elem_id="heat")
            parts |= _decision()
            parts["answers"] = gr.HTML(panels.answers(None), elem_id="answers")
        with gr.Tab("Side by side", id="race"):
            parts["race"] = gr.HTML(panels.race([]), elem_id="race")
            parts["race_maps"] = gr.HTML("", elem_id="race-maps")
    parts["tabs"] = tabs
    with gr.Row(elem_classes="dcut-files"):
        parts["trace_file"] = gr.DownloadButton(
            "Save the trace (JSON)", interactive=False, elem_id="trace-file", size="sm"
        )
        parts["plot_file"] = gr.DownloadButton(
            "Save the plots (SVG)", interactive=False, elem_id="plot-file", size="sm"
        )
    return parts


def _decision() -> dict[str, Any]:
    """Returns the parts that explain one step: its cost curve, its ranking, and each of its drafts."""
    parts: dict[str, Any] = {}
    with gr.Row(equal_height=True):
        with gr.Column(scale=2, min_width=320, elem_classes="card"):
            gr.HTML('<div class="dcut bar"><h2>Why this budget</h2></div>')
            parts["curve"] = gr.HTML(panels.hint(_CURVE), elem_id="curve")
        with gr.Column(scale=3, min_width=320, elem_classes="card"):
            gr.HTML('<div class="dcut bar"><h2>Which drafts it keeps</h2></div>')
            parts["ranking"] = gr.HTML(panels.ranking(None, None), elem_id="ranking")
            parts["number"] = gr.Slider(1, 2, 1, step=1, label="Step to look at", interactive=False, elem_id="number")
    with gr.Accordion("Every draft of this step", open=False, elem_id="drafts") as accordion:
        parts["lens"] = gr.HTML(panels.lens(None, None), elem_id="lens")
    parts["drafts"] = accordion
    return parts


def _wire(
    page: gr.Blocks,
    handlers: Handlers,
    visitor: gr.State,
    chip: gr.HTML,
    choices: list[Any],
    drawing: list[Any],
    parts: dict[str, Any],
) -> None:
    """Connects buttons with handlers."""
    outputs = list(parts.values())
    at_once: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
    in_turn: dict[str, Any] = {
        "concurrency_id": "model",
        "concurrency_limit": 1,
        "show_progress": "minimal",
        "show_progress_on": parts["status"],
        "api_visibility": "private",
    }
    for button, work in (
        ("run_button", handlers.run),
        ("step_button", handlers.step),
        ("compare_button", handlers.compare),
    ):
        begun = parts[button].click(_once(handlers.begin, parts), visitor, outputs, js=_TO_STATUS, **at_once)
        worked = begun.then(_each(work, parts), [visitor, *choices], outputs, **in_turn)
        worked.failure(_once(handlers.interrupted, parts), visitor, outputs, **at_once)
        worked.success(_once(handlers.settle, parts), visitor, outputs, **at_once)
    parts["stop_button"].click(_once(handlers.stop, parts), visitor, outputs, **at_once)
    parts["number"].input(_once(handlers.look, parts), [visitor, parts["number"]], outputs, **at_once)
    draw, *source, prompts = drawing
    draw.click(handlers.draw, source, prompts, **at_once)
    timer = gr.Timer(0.5)

    def tick() -> tuple[str, Any]:
        words, changing = handlers.chip()
        return words, gr.Timer(active=changing)

    page.load(lambda: handlers.chip()[0], None, chip, **at_once)
    timer.tick(tick, None, [chip, timer], **at_once)


def _once(handler: Callable[..., View], parts: dict[str, Any]) -> Callable[..., dict[Any, Any]]:
    """Returns the handler for Gradio: its view's names become components."""

    def named(*values: Any) -> dict[Any, Any]:
        return {parts[name]: value for name, value in handler(*values).items()}

    return named


def _each(handler: Callable[..., Iterator[View]], parts: dict[str, Any]) -> Callable[..., Iterator[dict[Any, Any]]]:
    def named(*values: Any) -> Iterator[dict[Any, Any]]:
        for view in handler(*values):
            yield {parts[name]: value for name, value in view.items()}

    return named
