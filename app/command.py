"""`hf-dcut demo`: serves the page."""

from __future__ import annotations

import argparse
import os

TARGET = "models/smollm2-135m-instruct"
DRAFTERS = ("examples/drafter", "examples/drafter+lookup", "lookup", "random")


def add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to `hf-dcut`."""
    parser = commands.add_parser("demo", help="a page on which D-cut's decisions can be watched")
    add_arguments(parser)
    parser.set_defaults(run=serve)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the page can be told on the command line."""
    parser.add_argument("--target", default=TARGET, help="folder or Hub id of the model (default: %(default)s)")
    parser.add_argument(
        "--drafter",
        action="append",
        help="folder or Hub id of a drafter, or lookup, random, or NAME+lookup for two at once; may be repeated "
        f"(default: {', '.join(DRAFTERS)})",
    )
    parser.add_argument("--dtype", default=None, help="of the model (default: float32 on a CPU, else as saved)")
    parser.add_argument("--cost-table", default="auto", help="file for measured seconds (default: Hugging Face cache)")
    parser.add_argument("--host", default=None, help="address to serve on (default: this machine only)")
    parser.add_argument("--port", type=int, default=None, help="port (default: the first free one from 7860)")
    parser.add_argument("--waiting", type=int, default=40, help="visitors in the queue (default: %(default)s)")
    parser.add_argument("--open", action="store_true", help="open a browser")


def serve(options: argparse.Namespace) -> None:
    """Serves the page until interrupted. The models load while it is there already.

    Raises:
        ValueError: Gradio is not installed.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    try:
        from hf_dcut.app.page import build, launch_options
    except ModuleNotFoundError as error:
        if error.name != "gradio":
            raise
        raise ValueError("the demo needs Gradio: pip install 'hf-dcut[demo]'") from error
    from hf_dcut.app.models import Models
    from hf_dcut.app.settings import Limits

    models = Models(
        target=options.target,
        drafters=tuple(options.drafter or DRAFTERS),
        dtype=options.dtype,
        cost_table=options.cost_table,
    )
    page = build(models, Limits(waiting=options.waiting))
    page.launch(
        server_name=options.host,
        server_port=options.port,
        inbrowser=options.open,
        prevent_thread_lock=True,
        **launch_options(),
    )
    models.start()
    page.block_thread()
