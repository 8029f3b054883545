"""`python -m hf_dcut.app`: the demo without the other commands."""

from __future__ import annotations

import argparse
import sys

from hf_dcut.app.command import add_arguments, serve


def main() -> int:
    """Returns the exit status: 0, or 2 when the page cannot be served as asked."""
    parser = argparse.ArgumentParser(prog="python -m hf_dcut.app", description="Watch D-cut decide, step by step.")
    add_arguments(parser)
    try:
        serve(parser.parse_args())
    except (ValueError, OSError) as error:
        print(f"hf-dcut demo: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
