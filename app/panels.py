"""Traces as HTML. Prompts and model output are text and only text: all of it goes through `text`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hf_dcut.app import plots
from hf_dcut.app.trace import Answer, Draft, Row, Step, Trace
from hf_dcut.wording import counted

# What the page's template engine could take for its own, beside what HTML could.
_SPECIAL = {ord("{"): "&#123;", ord("}"): "&#125;", ord("$"): "&#36;", ord("`"): "&#96;"}
_END = {"eos": "finished", "length": "at its length"}
_MARKS = {"accepted": "✓", "rejected": "✗", "cut": "✂"}
_COLUMNS = (
    "conf: the drafter’s probability, given that the drafts before it hold. surv: their product, the chance that it is "
    "committed. ✓ accepted, ✗ verified and rejected, ✂ cut."
)


def text(content: str) -> str:
    """Returns content as HTML that shows it, character by character."""
    return escape(content).translate(_SPECIAL)


def status(words: str, kind: str = "idle") -> str:
    """Returns the line that says what goes on; kind is "idle", "busy", "done" or "error"."""
    role = "alert" if kind == "error" else "status"
    bulb = '<span class="bulb" aria-hidden="true"></span>'
    return f'<div class="dcut status {kind}" role="{role}">{bulb}{text(words)}</div>'


def hint(words: str) -> str:
    """Returns what stands where nothing is to be seen yet."""
    return f'<div class="dcut hint">{text(words)}</div>'


def scrolling(plot: str) -> str:
    """Returns a plot that scrolls where the screen is too narrow for it, also by keyboard."""
    return f'<div class="dcut scroll" tabindex="0">{plot}</div>'


def legend() -> str:
    """Returns what the colours mean."""
    marks = (
        ("accepted", "drafted, verified, <b>accepted</b>"),
        ("kept2", "drafted, verified, rejected"),
        ("cut", "drafted, <b>cut</b>: never verified"),
        ("own", "the target’s own token, one a step"),
    )
    items = "".join(
        f'<li><svg viewBox="0 0 16 16" aria-hidden="true">{_swatch(kind)}</svg><span>{words}</span></li>'
        for kind, words in marks
    )
    return f'<ul class="dcut legend" aria-label="Legend">{items}</ul>'


def _swatch(kind: str) -> str:
    y, height = (11, 3) if kind == "own" else (1, 14)
    return f'<rect class="{kind}" x="1" y="{y}" width="14" height="{height}"/>'


def numbers(trace: Trace | None) -> str:
    """Returns the run's figures as tiles."""
    if trace is None:
        return _tiles([("–", name, "") for name in ("tokens a second", "tokens a step", "drafts cut", "steps")])
    cut = f"{trace.drafted - trace.kept} of {trace.drafted} never verified"
    return _tiles(
        [
            (f"{trace.tokens_per_second:.1f}", "tokens a second", f"{trace.tokens} in {trace.seconds:.1f} s"),
            (f"{trace.tokens_a_step:.2f}", "tokens a step", "per request; plain makes 1"),
            (f"{trace.cut_share:.0%}", "drafts cut", cut),
            (str(len(trace.steps)), "steps", _now(trace)),
        ]
    )


def _now(trace: Trace) -> str:
    """Returns what the latest step did, or what plain decoding would have taken."""
    if trace.done:
        return f"plain decoding takes {trace.longest - 1}"
    if not trace.steps:
        return ""
    last = trace.steps[-1]
    return "now plain" if last.budget is None else f"now verifying {last.verified} of {last.offered}"


def _tiles(values: Sequence[tuple[str, str, str]]) -> str:
    tiles = "".join(
        f"<div><dt>{name}</dt><dd>{value}<small>{text(note)}</small></dd></div>" for value, name, note in values
    )
    return f'<dl class="dcut numbers">{tiles}</dl>'


def answers(trace: Trace | None) -> str:
    """Returns a pane for each request, its tokens marked by who proposed them."""
    if trace is None:
        return hint("The answers appear here, one pane a request, as they are written.")
    panes = "".join(_pane(number, answer, trace.stopped) for number, answer in enumerate(trace.answers, 1))
    return f'<div class="dcut panes">{panes}</div>'


def _pane(number: int, answer: Answer, stopped: bool) -> str:
    drafted = sum(piece.drafted for piece in answer.pieces)
    live = answer.finish_reason is None and not stopped
    state = (
        _END.get(answer.finish_reason, answer.finish_reason)
        if answer.finish_reason
        else "stopped"
        if stopped
        else "running"
    )
    count = f"{counted(len(answer.pieces), 'token')}, {drafted} drafted" if answer.pieces else "waiting"
    caret = '<span class="caret" aria-hidden="true"></span>' if answer.pieces and live else ""
    return (
        f'<article aria-label="Request {number}"><header><b>{number}</b><span class="{"live" if live else "ended"}">'
        f"{state}</span><span>{count}</span></header>"
        f'<p class="prompt">{text(answer.prompt)}</p><p class="answer">{_tokens(answer)}{caret}</p></article>'
    )


def _tokens(answer: Answer) -> str:
    """Returns the text with a mark around each accepted draft."""
    marked = ((text(piece.text), piece.drafted) for piece in answer.pieces if piece.text)
    return "".join(f"<mark>{content}</mark>" if drafted else content for content, drafted in marked)


def ranking(trace: Trace | None, number: int | None) -> str:
    """Returns what one step decided, in words and as the ranking of all its drafts.

    Args:
        trace: the run.
        number: of the step, from 0; the latest when None.
    """
    if trace is None or not trace.steps:
        return hint(
            "All drafts of the batch in one line, the likeliest to survive first; the budget says where it is cut."
        )
    index = len(trace.steps) - 1 if number is None else number
    step = trace.steps[index]
    return f'<div class="dcut"><p>{_verdict(index, step)}</p>{scrolling(plots.ranking(step))}</div>'


def lens(trace: Trace | None, number: int | None) -> str:
    """Returns one step under the lens: every draft with its confidence, its survival and what became of it.

    Args:
        trace: the run.
        number: of the step, from 0; the latest when None.
    """
    if trace is None or not trace.steps:
        return hint("Each draft of one step, once a run is paused, stopped or finished.")
    index = len(trace.steps) - 1 if number is None else number
    rows = "".join(_lens_row(row) for row in trace.steps[index].rows)
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("Request", "Drafts, in order", "The target’s own"))
    return (
        f'<div class="dcut lens scroll" tabindex="0"><table><caption>Step {index + 1}. {_COLUMNS}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _verdict(index: int, step: Step) -> str:
    """Returns what was decided in this step, in words."""
    drafts = [draft for row in step.rows for draft in row.drafts]
    accepted = sum(draft.accepted for draft in drafts)
    if not drafts:
        return f"<b>Step {index + 1}</b> was plain: nothing was drafted, each request got the target’s own token."
    kept = [draft.survival for draft in drafts if draft.kept]
    lost = [draft.survival for draft in drafts if not draft.kept]
    edge = f" The weakest draft kept survives with {min(kept):.0%}" if kept else " No draft was worth verifying"
    edge += f"; the best that was cut with {max(lost):.0%}." if kept and lost else "."
    return (
        f"<b>Step {index + 1}.</b> Budget {step.budget:.0%}: {step.verified} of {step.offered} positions, of which "
        f"{len(step.rows)} are certain, so <b>{len(kept)} of {len(drafts)} drafts</b> were verified.{edge} "
        f"The target agreed with <b>{accepted}</b> and added {step.new_tokens - accepted} of its own, in "
        f"{step.seconds * 1e3:.0f} ms."
    )


def _lens_row(row: Row) -> str:
    chips = [_chip(draft, _fork(row, place)) for place, draft in enumerate(row.drafts)]
    drafted = "".join(chips) or "<li class='none'>nothing drafted</li>"
    own = f'<span class="token">{_visible(row.own)}</span>' if row.own else "–"
    return f'<tr><th scope="row">{row.request + 1}</th><td><ol>{drafted}</ol></td><td>{own}</td></tr>'


def _fork(row: Row, place: int) -> str:
    """Returns what a draft follows, if that is not the one before it: the draft's text, or the request's last token."""
    parent = row.drafts[place].parent
    if parent == place - 1:
        return ""
    return f"<small>after {_visible(row.drafts[parent].text) if parent >= 0 else 'the anchor'}</small>"


def _chip(draft: Draft, fork: str = "") -> str:
    fate = "accepted" if draft.accepted else "rejected" if draft.kept else "cut"
    return (
        f'<li class="{fate}"><span class="token">{_visible(draft.text)}</span>'
        f'<span class="mark" aria-hidden="true">{_MARKS[fate]}</span><span class="unseen">{fate}, </span>'
        f"{fork}<small>conf {_share(draft.confidence)}</small><small>surv <b>{_share(draft.survival)}</b></small></li>"
    )


def _share(value: float) -> str:
    return "1.0" if value >= 0.995 else f"{value:.2f}".removeprefix("0")


def _visible(content: str) -> str:
    """Returns a token's text with its white space made visible."""
    return text(content).replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣") or "∅"


def race(traces: Sequence[Trace], differences: Sequence[int | None] | None = None, state: str = "running") -> str:
    """Returns the methods beside each other: their numbers, and whether their texts are equal.

    Args:
        traces: of the methods that have begun.
        differences: where texts differ, one a request; None before all have finished.
        state: "running", "finished" or "stopped".
    """
    if not traces:
        return hint("D-cut, verifying every draft, and plain decoding, one after the other on the same prompts.")
    cards = "".join(_method(trace, state) for trace in traces)
    verdict = _equality(traces, differences, state)
    return f'<div class="dcut race">{verdict}<div class="methods">{cards}</div>{scrolling(plots.race(traces))}</div>'


def race_maps(traces: Sequence[Trace]) -> str:
    """Returns the heat maps of the methods under each other."""
    maps = "".join(f'<section class="map"><h3>{trace.method}</h3>{plots.heat_map(trace)}</section>' for trace in traces)
    return f'<div class="dcut maps">{maps}</div>'


def _method(trace: Trace, state: str) -> str:
    positions = sum(step.verified for step in trace.steps)
    rate = f"{trace.tokens_per_second:.1f}<small> tokens a second</small>"
    counts = f"{counted(len(trace.steps), 'step')}, {positions} positions verified, {counted(trace.tokens, 'token')}"
    return (
        f'<section><h3>{trace.method}</h3><p class="big">{rate}</p><p>{counts}</p>'
        f'<p class="state">{"finished" if trace.done else state}</p></section>'
    )


def _equality(traces: Sequence[Trace], differences: Sequence[int | None] | None, state: str) -> str:
    if state == "stopped":
        return '<p class="verdict">Stopped before every method had finished: there is nothing to compare.</p>'
    if differences is None:
        return f'<p class="verdict">Running {text(traces[-1].method)}; texts are compared at the end.</p>'
    total = sum(len(answer.tokens) for answer in traces[0].answers)
    if all(place is None for place in differences):
        return (
            f'<p class="verdict equal"><span aria-hidden="true">✓</span> All {len(differences)} texts are equal under '
            f"all {len(traces)} methods, token for token: {total} tokens.</p>"
        )
    parts = [f"request {n} from token {place + 1}" for n, place in enumerate(differences, 1) if place is not None]
    return (
        f'<p class="verdict unequal"><span aria-hidden="true">✗</span> Texts differ: {"; ".join(parts)}. Where the '
        f"target’s two best tokens tie to within rounding, either may come.</p>"
    )
