"""The check as one Markdown page: what passed, the paper's table 3, and what else was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hf_dcut.bench.table import markdown, number
from hf_dcut.config import PAPER_RATIOS

Result = dict[str, Any]


def page(found: Mapping[str, Any]) -> str:
    """Returns the page of a check's results, as `gpu_check` returns them."""
    parts = found["parts"]
    blocks = [*_head(found), *_summary(parts)]
    for name, show in _SHOWN.items():
        if name in parts and parts[name]["state"] == "done":
            blocks += show(parts[name])
    blocks += _skipped(found["skipped"])
    return "\n\n".join(blocks) + "\n"


def _head(found: Mapping[str, Any]) -> Iterator[str]:
    yield "# GPU check"
    size = "small shapes: only that everything runs" if found["tiny"] else f"{found['minutes']:g} minutes at most"
    yield (
        f"hf-dcut {found['version']}, commit {found['commit'] or 'unknown'}; {size}; {found['seconds']:.0f} s. "
        f"**{'Passed' if found['passed'] else 'FAILED'}**, {len(found['skipped'])} things left out."
    )


def _summary(parts: Mapping[str, Result]) -> Iterator[str]:
    rows = []
    for name, result in parts.items():
        verdict = {True: "passed", False: "FAILED", None: "-"}[result.get("passed")]
        left_out = len(result.get("skipped", ()))
        rows.append([name, result["state"], verdict, number(result.get("seconds"), ".0f"), str(left_out)])
    yield markdown(["part", "state", "verdict", "s", "left out"], rows)
    reasons = [f"- {name}: {result['reason']}" for name, result in parts.items() if "reason" in result]
    if reasons:
        yield "\n".join(reasons)


def _device(result: Result) -> Iterator[str]:
    facts = ", ".join(f"{key} {value}" for key, value in result["machine"].items() if value is not None)
    yield f"Machine: {facts}."
    yield markdown(["op", "path"], [[op, path] for op, path in result["paths"].items()])


def _kernels(result: Result) -> Iterator[str]:
    yield "## Kernels against their references"
    groups: dict[tuple[str, str], list[Result]] = {}
    for check in result["checks"]:
        groups.setdefault((check["op"], check["path"]), []).append(check)
    rows = []
    for (op, path), checks in groups.items():
        right = sum(check.get("passed", False) for check in checks)
        faults = [f"{check['case']}: {check['fault']}" for check in checks if check.get("fault")]
        rows.append([op, path, f"{right}/{len(checks)}", faults[0] if faults else ""])
    yield markdown(["op", "path", "agree", "first fault"], rows)


def _exact(result: Result) -> Iterator[str]:
    yield "## Answers against plain `generate`"
    rows = [
        [
            *(str(e[key]) for key in ("dtype", "drafter", "budget", "equal", "ties", "mismatches")),
            f"{e['margin']:.2g}",
            number(e["accepted_a_step"] or None),
        ]
        for e in result["entries"]
    ]
    header = ["dtype", "drafter", "budget", "equal", "ties", "MISMATCHES", "largest margin", "tokens a step"]
    yield markdown(header, rows)
    close = ", ".join(f"{dtype}: {share:.1%}" for dtype, share in result["close_tokens"].items())
    yield f"Tokens of the plain answers that are within a tie, so that a difference there proves nothing: {close}."


def _costs(result: Result) -> Iterator[str]:
    limits = result["ceilings"]
    yield (
        f"## Table 3: milliseconds of a step\n\nQwen3-8B's shape, {result['dtype']}, D = {result['draft_tokens']}, "
        f"{result['drafter_layers']} drafter layers, {result['kv_length']} cells in use, {result['attention']}, "
        f"{_graphed(result['graphed'])}. Each "
        "cell: measured / target / floor, and the paper's on an H800 in brackets. Floors by "
        f"{limits['bytes_per_second'] / 1e12:.2f} TB/s and {limits['flops_per_second'] / 1e12:.0f} TFLOP/s, "
        f"{limits['source']}. Targets met: {result['targets_met']} of {result['targets']}."
    )
    rows: dict[int, list[str]] = {}
    for cell in result["cells"]:
        text = f"{_ms(cell['seconds'])} / {_ms(cell['target'])} / {_ms(cell['floor'])}"
        rows.setdefault(cell["B"], [str(cell["B"])]).append(text + f" ({_ms(cell['paper'])})")
    yield markdown(["B", *(f"{share:.0%}" for share in PAPER_RATIOS)], list(rows.values()))
    lines = [
        [str(cell["B"]), f"{cell['share']:.0%}", _ms(cell["bandwidth_floor"], 2), _ms(cell["flop_floor"], 2)]
        for cell in result["cells"]
    ]
    yield "Floors by memory and by arithmetic alone:\n\n" + markdown(["B", "share", "bandwidth", "FLOP"], lines)
    plain = [
        [
            str(step["B"]),
            *(_ms(step[key], 2) for key in ("seconds", "bandwidth_floor", "flop_floor")),
            f"{step['over_floor']:.2f} (at most {step['limit']})",
        ]
        for step in result["plain"]
    ]
    yield "Plain steps:\n\n" + markdown(["B", "measured", "bandwidth floor", "FLOP floor", "over bandwidth"], plain)


def _graphed(sizes: Sequence[int]) -> str:
    return f"replayed as CUDA graphs at B = {', '.join(map(str, sizes))}" if sizes else "without CUDA graphs"


def _selection(result: Result) -> Iterator[str]:
    low, high = result["paper_share"]
    rows = [
        [str(row["B"]), _ms(row["p50"], 3), _ms(row["p95"], 3), f"{row['share_p50']:.1%}", f"{row['share_p95']:.1%}"]
        for row in result["rows"]
    ]
    yield (
        f"## Selection\n\nShare of the fullest step; the paper's is {low:.1%} to {high:.1%} at B = 64.\n\n"
        + markdown(["B", "p50 ms", "p95 ms", "share p50", "share p95"], rows)
    )


def _graphs(result: Result) -> Iterator[str]:
    keys = ("source", "rows", "steps", "replayed")
    rows = [[*(str(run[key]) for key in keys), run["fault"] or "equal"] for run in result["runs"]]
    yield f"## Graphs against eager steps\n\nBucket: {result['bucket']}.\n\n" + markdown(
        ["budget from", "B", "steps", "replayed", "found"], rows
    )


def _speed(result: Result) -> Iterator[str]:
    yield (
        f"## Tokens per second\n\n{result['note']}. In brackets: tokens a step; the paper's tokens per second on an "
        "H800.\n\n" + _rates(result["entries"])
    )


def _compiled(result: Result) -> Iterator[str]:
    yield "## Tokens per second, compiled\n\n" + _rates(result["entries"])


def _conditional(result: Result) -> Iterator[str]:
    rows = [
        [
            str(entry["T"]),
            "equal" if entry["same"] else "DIFFERENT",
            *(_ms(entry[way], 3) for way in ("one_graph", "two_graphs_and_a_read")),
        ]
        for entry in result["entries"]
    ]
    yield f"## One graph with a branch for each budget\n\nB = {result['B']}.\n\n" + markdown(
        ["T", "logits", "one graph, ms", "two and a read, ms"], rows
    )


def _rates(entries: Sequence[Result]) -> str:
    """Returns tokens per second by method and batch size."""
    sizes = sorted({entry["B"] for entry in entries})
    found = {(entry["method"], entry["data"], entry["B"]): entry for entry in entries}
    rows = []
    for method, data in dict.fromkeys((entry["method"], entry["data"]) for entry in entries):
        label = f"{method}, {data} (synthetic)" if data else method
        rows.append([label, *(_rate(found.get((method, data, batch))) for batch in sizes)])
    return markdown(["method", *(f"B = {batch}" for batch in sizes)], rows)


def _rate(entry: Result | None) -> str:
    if entry is None:
        return "-"
    if entry["right"] != entry["answers"]:
        return f"{entry['answers'] - entry['right']} WRONG"
    text = f"{entry['tokens_per_second']:.0f}"
    beside = [number(entry["tokens_a_step"])] if entry["tokens_a_step"] else []
    if entry["paper"]:
        beside.append(f"paper {entry['paper']:.0f}")
    return text + (f" ({'; '.join(beside)})" if beside else "")


def _times(result: Result) -> Iterator[str]:
    rows = [
        [
            case["op"],
            case["case"],
            case["path"],
            _ms(case.get("p50"), 3),
            _ms(case.get("p95"), 3),
            case.get("fault", ""),
        ]
        for case in result["times"]
        if "skipped" not in case
    ]
    yield "## Kernels' milliseconds\n\n" + markdown(["op", "case", "path", "p50", "p95", "fault"], rows)


def _skipped(skipped: Sequence[Mapping[str, str]]) -> Iterator[str]:
    if skipped:
        yield "## Left out\n\n" + markdown(["what", "why"], [[item["what"], item["why"]] for item in skipped])


def _ms(seconds: float | None, digits: int = 1) -> str:
    return number(None if seconds is None else seconds * 1e3, f".{digits}f")


_SHOWN: dict[str, Callable[[Result], Iterator[str]]] = {
    "device": _device,
    "kernels": _kernels,
    "exact": _exact,
    "costs": _costs,
    "selection": _selection,
    "graphs": _graphs,
    "speed": _speed,
    "times": _times,
    "compiled": _compiled,
    "conditional": _conditional,
}
