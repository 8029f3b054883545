"""The demo as a Space: what `hf-dcut demo` serves, with the target from the Hub and the drafter that lies beside it."""

import argparse
from pathlib import Path

from hf_dcut.app.command import add_arguments, serve

parser = argparse.ArgumentParser()
add_arguments(parser)
here = Path(__file__).resolve().parent
drafters = [f"--drafter={name}" for name in (here / "drafter", f"{here / 'drafter'}+lookup", "lookup", "random")]
serve(parser.parse_args(["--target=HuggingFaceTB/SmolLM2-135M-Instruct", *drafters]))
