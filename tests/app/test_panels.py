from __future__ import annotations

from html.parser import HTMLParser

import pytest

from hf_dcut.app import panels
from hf_dcut.app.trace import Answer, Draft, Piece, Row, Step, Trace


class Reader(HTMLParser):
    """Reads text and tags; complains about tags that are not closed in order."""

    VOID = ("br", "hr")

    def __init__(self, content: str) -> None:
        super().__init__()
        self.text, self.tags, self.open = "", [], []
        self.feed(content)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


NASTY = "<script>alert(1)</script> <b>&lt;</b> {{x}} ${y} `z` \"q\" 'r' </p>"


def draft(survival: float, kept: bool, accepted: bool, text: str = " to", parent: int = -1) -> Draft:
    return Draft(1, text, parent, 0.5, survival, kept, accepted)


def step(*rows: Row, budget: float | None = 0.5) -> Step:
    verified = len(rows) + sum(row.kept for row in rows)
    return Step(rows, budget, verified, 4 * len(rows), 0.1, len(rows), None)


DRAFTS = (draft(0.9, True, True), draft(0.5, True, False, parent=0), draft(0.2, False, False, parent=1))


def trace(text: str = "hello", reason: str | None = None, stopped: bool = False) -> Trace:
    pieces = [Piece(5, text, False), Piece(6, " there", True)]
    made = Trace("D-cut", 3, 8, [Answer("prompt " + text, pieces, reason), Answer("other")], seconds=0.5)
    made.steps.append(step(Row(0, DRAFTS, text, False), Row(1, (draft(0.4, True, False),), "x", False)))
    made.stopped = stopped
    return made


def test_text_shows_what_it_was_given() -> None:
    reader = Reader(panels.text(NASTY))
    assert reader.text == NASTY
    assert not reader.tags


def test_text_leaves_nothing_to_a_template() -> None:
    assert not set(panels.text(NASTY)) & set("{}$`<>\"'")


@pytest.mark.parametrize(
    "content",
    [
        panels.answers(trace(NASTY)),
        panels.lens(trace(NASTY), None),
        panels.ranking(trace(NASTY), 0),
        panels.status(NASTY, "error"),
        panels.numbers(trace(NASTY)),
        panels.race([trace(NASTY), trace(NASTY)]),
        panels.race_maps([trace(NASTY)]),
    ],
)
def test_prompts_and_output_stay_text_everywhere(content: str) -> None:
    reader = Reader(content)
    assert not {"script", "b" if "<b>&lt;" in content else "script"} & {tag for tag, _ in reader.tags}
    assert "{{" not in content
    assert "${" not in content
    assert not any(name.startswith("on") for _, attributes in reader.tags for name in attributes)


def test_a_pane_shows_prompt_text_and_origin() -> None:
    content = panels.answers(trace())
    reader = Reader(content)
    assert "prompt hello" in reader.text
    assert "hello<mark> there</mark>" in content
    assert "2 tokens, 1 drafted" in reader.text
    assert [a["aria-label"] for tag, a in reader.tags if tag == "article"] == ["Request 1", "Request 2"]


@pytest.mark.parametrize(
    ("reason", "stopped", "words"),
    [(None, False, "running"), (None, True, "stopped"), ("eos", True, "finished"), ("length", False, "at its length")],
)
def test_a_pane_says_how_it_stands(reason: str | None, stopped: bool, words: str) -> None:
    first = Reader(panels.answers(trace(reason=reason, stopped=stopped))).text.split("Request")[0]
    assert words in first


def test_the_lens_tells_each_draft_apart_without_colour() -> None:
    reader = Reader(panels.lens(trace(), None))
    kinds = [attributes.get("class") for tag, attributes in reader.tags if tag == "li"]
    assert kinds == ["accepted", "rejected", "cut", "rejected"]
    for word in ("accepted, ", "rejected, ", "cut, ", "✓", "✗", "✂", "␣to", "surv .90", "surv .20"):
        assert word in reader.text


def test_the_ranking_is_told_in_words() -> None:
    words = Reader(panels.ranking(trace(), None)).text
    assert "Budget 50%: 5 of 8 positions, of which 2 are certain, so 3 of 4 drafts were verified" in words
    assert "The weakest draft kept survives with 40%; the best that was cut with 20%." in words
    assert "The target agreed with 1 and added 1 of its own" in words


def test_a_plain_step_is_told_in_words() -> None:
    made = trace()
    made.steps.append(step(Row(0, (), "y", False), budget=None))
    assert "Step 2 was plain" in Reader(panels.ranking(made, None)).text
    assert "nothing drafted" in Reader(panels.lens(made, None)).text
    assert "now plain" in Reader(panels.numbers(made)).text


def test_numbers_are_those_of_the_trace() -> None:
    words = Reader(panels.numbers(trace())).text
    for part in ("4.0", "2 in 0.5 s", "1.50", "25%", "1 of 4 never verified", "now verifying 5 of 8"):
        assert part in words


def test_an_error_is_an_alert() -> None:
    assert 'role="alert"' in panels.status("no", "error")
    assert 'role="status"' in panels.status("yes", "done")


def test_equal_and_unequal_texts_are_told() -> None:
    traces = [trace(reason="eos"), trace(reason="eos")]
    assert "All 2 texts are equal under all 2 methods" in Reader(panels.race(traces, [None, None], "finished")).text
    assert "Texts differ: request 2 from token 8" in Reader(panels.race(traces, [None, 7], "finished")).text
    assert "nothing to compare" in Reader(panels.race(traces, None, "stopped")).text


def test_everything_has_a_face_before_the_first_run() -> None:
    for content in (
        panels.numbers(None),
        panels.answers(None),
        panels.ranking(None, None),
        panels.lens(None, None),
        panels.race([]),
        panels.hint("x"),
        panels.legend(),
    ):
        assert Reader(content).text


def test_a_draft_that_does_not_follow_the_one_before_it_tells_which() -> None:
    made = trace()
    drafts = (draft(0.5, True, True, " the"), draft(0.3, True, False, " a"), draft(0.2, True, False, " cat", parent=0))
    made.steps.append(step(Row(0, drafts, "x", False)))
    words = Reader(panels.lens(made, 1)).text
    assert "␣the✓accepted, conf" in words
    assert "␣a✗rejected, after the anchorconf" in words
    assert "␣cat✗rejected, after ␣theconf" in words
