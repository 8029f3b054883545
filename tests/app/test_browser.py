"""The page in a real browser. A tiny random target keeps it quick; only the pictures need a trained one."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

gradio = pytest.importorskip("gradio")
playwright = pytest.importorskip("playwright.sync_api")

from hf_dcut.app.models import Models  # noqa: E402 (skipped without Gradio)
from hf_dcut.app.page import build, launch_options  # noqa: E402
from hf_dcut.app.run import Run  # noqa: E402
from hf_dcut.app.settings import Limits  # noqa: E402

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
]
PATIENCE = 120_000  # milliseconds; a loaded machine is slow, and a test that hangs fails anyway
PROMPTS = "a b c a b c a b\none two one two one\nxyzzy xyzzy xy\n<script>window.hacked = 1</script> {{1}} ${1}"


@pytest.fixture(scope="module")
def server(models: Models) -> Iterator[str]:
    """The address of the page, with a short queue."""
    yield from served(models, Limits(waiting=30, new_tokens=256, open_runs=2))


def served(models: Models, limits: Limits) -> Iterator[str]:
    page = build(models, limits)
    # On a loaded machine the first answer may take longer than the three seconds Gradio gives itself.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradio.networking, "url_ok", lambda url: True)
        _, url, _ = page.launch(prevent_thread_lock=True, quiet=True, **launch_options())
    yield url
    page.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=CHROMIUM, args=["--headless", "--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser: Any, server: str) -> Iterator[Callable[..., Any]]:
    """`visit(url=server, **context)`: a new visitor's page with four prompts; fails on errors and foreign addresses."""
    contexts, faults = [], []

    def build_page(url: str = server, **options: Any) -> Any:
        contexts.append(browser.new_context(accept_downloads=True, **options))
        page = contexts[-1].new_page()
        page.set_default_timeout(PATIENCE)
        home = urlsplit(url).netloc
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda r: faults.append(r.url) if foreign(r.url, home) else None)
        page.goto(url)
        page.locator("#prompts textarea").fill(PROMPTS)
        set_tokens(page, 24)
        return page

    yield build_page
    for context in contexts:
        context.close()
    assert not faults


def foreign(url: str, home: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in ("http", "https", "ws", "wss") and parts.netloc != home


def press(page: Any, button: str) -> None:
    """Clicks a button; what the status said before is gone, so that a later wait is for something new."""
    page.evaluate("document.querySelector('#status .status').textContent = ''")
    page.locator(button).click()


def set_tokens(page: Any, count: int) -> None:
    page.locator("#new-tokens input[type=number]").fill(str(count))
    page.keyboard.press("Tab")


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take a tenth of a second more, so that there is time to stop and to queue."""
    step = Run.step

    def slow(run: Run) -> None:
        time.sleep(0.1)
        step(run)

    monkeypatch.setattr(Run, "step", slow)


def wait_status(page: Any, words: str) -> None:
    script = "words => document.querySelector('#status').innerText.includes(words)"
    page.wait_for_function(script, arg=words, timeout=PATIENCE)


def wait_idle(page: Any) -> None:
    page.wait_for_function("!document.querySelector('#run').disabled", timeout=PATIENCE)


def shown(page: Any) -> list[str]:
    return [pane.inner_text() for pane in page.locator("#answers .answer").all()]


def test_run_to_the_end(visit: Callable[..., Any], models: Models) -> None:
    page = visit()
    assert page.locator("#stop").is_disabled()
    press(page, "#run")
    wait_status(page, "Finished: ")
    wait_idle(page)
    assert len(shown(page)) == 4
    assert page.locator("#heat svg").get_attribute("aria-label").startswith("Heat map of 4 requests over ")
    assert page.locator("#heat path.own").count() == 1
    assert page.locator("#curve svg").count() == 1
    assert page.locator("#stop").is_disabled()
    assert "ready" in page.locator("#chip").inner_text()


def test_output_is_text_and_never_html(visit: Callable[..., Any]) -> None:
    page = visit()
    press(page, "#run")
    wait_status(page, "Finished: ")
    panes = page.locator("#answers")
    assert "<script>window.hacked = 1</script> {{1}} ${1}" in panes.inner_text()
    assert "<script>" in "".join(shown(page)), "the tiny target says so"
    assert panes.locator("script").count() == 0
    assert page.evaluate("window.hacked") is None


def test_files_hold_the_run(visit: Callable[..., Any], tmp_path: Path) -> None:
    page = visit()
    press(page, "#run")
    wait_status(page, "Finished: ")
    wait_idle(page)
    with page.expect_download() as download:
        page.locator("#trace-file").click()
    download.value.save_as(tmp_path / "trace.json")
    (trace,) = json.loads((tmp_path / "trace.json").read_text())
    assert [answer["prompt"] for answer in trace["answers"]] == PROMPTS.split("\n")
    for answer, text in zip(trace["answers"], shown(page), strict=True):
        assert "".join(piece["text"] for piece in answer["pieces"]).split() == text.split()
    with page.expect_download() as download:
        page.locator("#plot-file").click()
    download.value.save_as(tmp_path / "plots.svg")
    image = browser_image(page, (tmp_path / "plots.svg").read_text())
    assert image[0] > 900
    assert image[1] > 300


def browser_image(page: Any, svg: str) -> list[float]:
    """Returns width and height of the image as the browser reads it, which is strict about XML."""
    return page.evaluate(
        """svg => new Promise((resolve, reject) => {
            const image = new Image();
            image.onload = () => resolve([image.naturalWidth, image.naturalHeight]);
            image.onerror = () => reject(new Error("not an image"));
            image.src = URL.createObjectURL(new Blob([svg], { type: "image/svg+xml" }));
        })""",
        svg,
    )


def test_stop_and_run_again(visit: Callable[..., Any], slowly: None) -> None:
    page = visit()
    set_tokens(page, 256)
    press(page, "#run")
    wait_status(page, "Running")
    press(page, "#stop")
    wait_status(page, "Stopped after ")
    wait_idle(page)
    assert "stopped" in page.locator("#answers").inner_text()
    set_tokens(page, 8)
    press(page, "#run")
    wait_status(page, "Finished: ")


def test_change_the_budget(visit: Callable[..., Any]) -> None:
    page = visit()
    assert not page.locator("#share").is_visible()
    page.get_by_label("Fixed share").check()
    page.locator("#share").wait_for()
    verified = []
    for share in ("100", "25"):
        page.locator("#share input[type=number]").fill(share)
        page.keyboard.press("Tab")
        page.locator("#drafter input").click()
        page.get_by_role("option", name="Untrained DFlash").click()
        press(page, "#run")
        wait_status(page, "Finished: ")
        wait_idle(page)
        verified.append(page.locator("#numbers").inner_text())
    assert "0%" in verified[0]
    assert verified[0] != verified[1]
    assert "Budget 25%" in page.locator("#ranking").inner_text()


def test_step_by_step(visit: Callable[..., Any]) -> None:
    page = visit()
    for number in (1, 2):
        press(page, "#step")
        wait_status(page, f"Paused after step {number}.")
        wait_idle(page)
    page.locator("#lens table").wait_for()
    # A request may have ended in the first step.
    assert 2 <= page.locator("#lens tbody tr").count() <= 4
    assert "Step 2." in page.locator("#ranking").inner_text()
    page.locator("#number input[type=number]").fill("1")
    page.keyboard.press("Tab")
    page.wait_for_function("document.querySelector('#ranking').innerText.includes('Step 1')", timeout=PATIENCE)
    assert page.locator("#run").inner_text() == "Run on"
    press(page, "#run")
    wait_status(page, "Finished: ")
    wait_idle(page)
    assert page.locator("#run").inner_text() == "Run"


def test_stepping_ends_by_stop(visit: Callable[..., Any]) -> None:
    page = visit()
    press(page, "#step")
    wait_status(page, "Paused after step 1.")
    wait_idle(page)
    press(page, "#stop")
    wait_status(page, "Stopped after 1 step:")
    press(page, "#step")
    wait_status(page, "Paused after step 1.")


def test_side_by_side(visit: Callable[..., Any]) -> None:
    page = visit()
    press(page, "#compare")
    wait_status(page, "Finished: three methods")
    assert "All 4 texts are equal under all 3 methods" in page.locator("#race").inner_text()
    assert page.locator("#race-maps svg").count() == 3
    assert page.locator("#race-maps").is_visible()


def test_prompts_are_drawn(visit: Callable[..., Any]) -> None:
    page = visit()
    page.locator("#count input").fill("5")
    page.locator("#draw").click()
    page.wait_for_function("!document.querySelector('#prompts textarea').value.startsWith('a b c')", timeout=PATIENCE)
    prompts = page.locator("#prompts textarea").input_value().split("\n\n")  # they have several lines each
    assert len(prompts) == 5


def test_mistakes_are_told(visit: Callable[..., Any]) -> None:
    page = visit()
    page.locator("#prompts textarea").fill("only one")
    press(page, "#run")
    wait_status(page, "Prompts: 1 given, 2 to 32 are allowed.")
    assert page.locator("#status [role=alert]").count() == 1
    wait_idle(page)


def test_two_visitors_see_their_own(visit: Callable[..., Any]) -> None:
    first, second = visit(), visit()
    second.locator("#prompts textarea").fill("secret secret se\nhidden hidden hi")
    for page in (first, second):
        press(page, "#run")
    for page in (first, second):
        wait_status(page, "Finished: ")
    assert len(shown(first)) == 4
    assert len(shown(second)) == 2
    assert "secret" not in first.locator("#answers").inner_text()
    assert "xyzzy" not in second.locator("#answers").inner_text()


def test_two_visitors_step_in_turn(visit: Callable[..., Any]) -> None:
    pages = [visit(), visit()]
    for number in (1, 2):
        for page in pages:
            press(page, "#step")
            wait_status(page, f"Paused after step {number}.")
            wait_idle(page)
    third = visit()
    press(third, "#step")
    wait_status(third, "Paused after step 1.")
    # Two runs may be open; the third took the place of the one that was opened first.
    pages[0].locator("#step").click()
    wait_status(pages[0], "Paused after step 1.")


def test_stopping_while_waiting(visit: Callable[..., Any], slowly: None) -> None:
    busy, waiting = visit(), visit()
    set_tokens(busy, 256)
    press(busy, "#run")
    wait_status(busy, "Running")
    press(waiting, "#run")
    waiting.wait_for_function("!document.querySelector('#stop').disabled", timeout=PATIENCE)
    press(waiting, "#stop")
    wait_status(waiting, "Stopped before it began.")
    wait_idle(waiting)
    wait_idle(busy)
    assert "tokens" in busy.locator("#numbers").inner_text()


def test_twenty_in_the_queue(visit: Callable[..., Any]) -> None:
    # Each in a context of its own: one browser profile opens six connections to a server, and each page keeps one.
    others = [visit() for _ in range(20)]
    for number, other in enumerate(others):
        other.locator("#prompts textarea").fill(f"visitor {number} visitor {number}\n{number} {number} {number}")
        set_tokens(other, 8)
    for other in others:
        press(other, "#run")
    for number, other in enumerate(others):
        wait_status(other, "Finished: ")
        assert f"visitor {number} visitor {number}\n" in other.locator("#answers").inner_text()


def test_a_full_queue_says_so(models: Models, visit: Callable[..., Any], slowly: None) -> None:
    for url in served(models, Limits(waiting=1)):
        pages = [visit(url) for _ in range(4)]
        for page in pages:
            set_tokens(page, 128)
        for page in pages:
            press(page, "#run")
        told = [0.0]
        begin = time.monotonic()
        while not any("queue is full" in page.locator("#status").inner_text() for page in pages):
            told.append(time.monotonic() - begin)
            assert told[-1] < PATIENCE / 1e3
            pages[0].wait_for_timeout(100)
        for page in pages:
            wait_idle(page)


def test_everything_has_a_name_and_works_by_keyboard(visit: Callable[..., Any]) -> None:
    page = visit()
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, input, textarea, select")]
            .filter(e => e.offsetParent && !(e.innerText || e.ariaLabel || e.labels?.length || e.title))
            .map(e => e.outerHTML.slice(0, 120))"""
    )
    assert not unnamed
    page.locator("#run").focus()
    page.keyboard.press("Enter")
    wait_status(page, "Finished: ")
    wait_idle(page)
    assert all(page.locator(f"{name} svg[role=img]").get_attribute("aria-label") for name in ("#heat", "#curve"))


def test_a_phone_has_no_sideways_scroll(visit: Callable[..., Any]) -> None:
    page = visit(viewport={"width": 375, "height": 740})
    press(page, "#run")
    wait_status(page, "Finished: ")
    wait_idle(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 375


def test_the_page_stays_alive_with_eight_requests(visit: Callable[..., Any]) -> None:
    page = visit()
    prompts = "\n".join(
        f"{word} {word} {word} {word}" for word in ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    )
    page.locator("#prompts textarea").fill(prompts)
    set_tokens(page, 128)
    page.evaluate(
        """() => { window.gaps = []; let last = performance.now();
            const tick = now => { window.gaps.push(now - last); last = now; requestAnimationFrame(tick); };
            requestAnimationFrame(tick); }"""
    )
    page.evaluate(
        """() => { window.pictures = 0;
            new MutationObserver(() => window.pictures++).observe(
                document.querySelector("#answers"), { childList: true, subtree: true }); }"""
    )
    press(page, "#run")
    wait_status(page, "Finished: ")
    gaps = sorted(page.evaluate("window.gaps"))
    assert page.evaluate("window.pictures") >= 5, "text must stream"
    assert gaps[len(gaps) * 95 // 100] < 500, "milliseconds between frames of the browser"
