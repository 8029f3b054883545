"""`hf-dcut demo` from its start: the page does not wait for the models."""

from __future__ import annotations

import threading
from typing import Any
from urllib.request import ProxyHandler, build_opener

import pytest

gradio = pytest.importorskip("gradio")

from hf_dcut.app.models import Models  # noqa: E402 (skipped without Gradio)
from hf_dcut.cli import main  # noqa: E402


def test_the_page_is_served_while_the_models_load(monkeypatch: pytest.MonkeyPatch) -> None:
    loading, release = threading.Event(), threading.Event()
    happened: list[object] = []
    launch = gradio.Blocks.launch

    def launch_and_tell(page: Any, **options: Any) -> Any:
        answer = launch(page, **options)
        happened.append("served")
        return answer

    def load(models: Models) -> None:
        happened.append("loading")
        loading.set()
        release.wait(60)
        happened.append("loaded")

    def visit(page: Any) -> None:
        """Looks at the page while the loader is stuck, where the command would wait for ever."""
        assert loading.wait(60)
        with build_opener(ProxyHandler({})).open(page.local_url, timeout=60) as answer:
            happened.append((answer.status, "D-cut, step by step" in answer.read().decode()))
        page.close()

    monkeypatch.setattr(Models, "_load", load)
    monkeypatch.setattr(gradio.Blocks, "launch", launch_and_tell)
    monkeypatch.setattr(gradio.Blocks, "block_thread", visit)
    monkeypatch.setattr(gradio.networking, "url_ok", lambda url: True)
    try:
        assert main(["demo", "--target", "models/nowhere", "--drafter", "lookup"]) == 0
        assert happened == ["served", "loading", (200, True)]
    finally:
        release.set()
