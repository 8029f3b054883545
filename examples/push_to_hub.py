"""Pushes to the Hub what belongs there: the `custom_generate` repository, a drafter with its card, the demo's Space.

    python examples/push_to_hub.py custom-generate owner/dcut --model models/smollm2-135m-instruct
    python examples/push_to_hub.py drafter owner/smollm2-135m-dflash --folder examples/drafter
    python examples/push_to_hub.py space owner/dcut-demo --drafter examples/drafter
    ... --dry-run    # says what would be uploaded, and checks the card

Log in first with `hf auth login`. New repositories are private until `--public` is given.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi, ModelCard
from huggingface_hub.utils import HfHubHTTPError

HERE = Path(__file__).resolve().parent
# What the front matter of each kind's README must say.
CARDS = {
    "custom-generate": {"library_name": "transformers", "tags": "custom_generate"},
    "drafter": {"library_name": "hf-dcut", "tags": "speculative-decoding", "base_model": None, "license": None},
    "space": {"sdk": "gradio", "app_file": "app.py", "title": None},
}
LEFT_OUT = ("__pycache__", ".DS_Store")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 when everything is uploaded, or would be; 2 when something is missing or refused."""
    options = parse(arguments)
    try:
        files = collect(options)
        check_card(options.kind, files)
        if options.dry_run:
            print(f"{options.repository} would get:")
            for place, path in sorted(files.items()):
                print(f"  {place}  ({path.stat().st_size:,} bytes)")
        else:
            print(push(HfApi(), options, files))
    except (ValueError, OSError, HfHubHTTPError) as error:
        print(f"push_to_hub {options.kind}: {error}", file=sys.stderr)
        return 2
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    custom = kinds.add_parser("custom-generate", help="the repository for generate(custom_generate=...)")
    custom.add_argument("--model", type=Path, default=None, help="folder of a model whose files go along")
    drafter = kinds.add_parser("drafter", help="a drafter: config, weights and card")
    drafter.add_argument("--folder", type=Path, required=True, help="folder of the drafter")
    space = kinds.add_parser("space", help="the demo")
    space.add_argument("--drafter", type=Path, required=True, help="folder of the drafter that goes along")
    for kind in (custom, drafter, space):
        kind.add_argument("repository", help="owner/name")
        kind.add_argument("--public", action="store_true", help="visible to everybody; else private if it is new")
        kind.add_argument("--message", default="Update", help="of the commit")
        kind.add_argument("--dry-run", action="store_true", help="upload nothing, say what would be")
    return parser.parse_args(arguments)


def collect(options: argparse.Namespace) -> dict[str, Path]:
    """Returns the files of the repository by their place in it.

    Raises:
        ValueError: a folder is missing or lacks what makes it a drafter or a model.
    """
    if options.kind == "drafter":
        return tree(options.folder, ("config.json", "README.md"))
    if options.kind == "space":
        beside = tree(options.drafter, ("config.json",))
        own = tree(HERE / "space", ("app.py", "requirements.txt"))
        return own | {f"drafter/{place}": path for place, path in beside.items()}
    own = tree(HERE / "custom_generate", ("custom_generate/generate.py", "README.md"))
    model = tree(options.model, ("config.json",)) if options.model else {}
    return {place: path for place, path in model.items() if place != "README.md"} | own


def tree(folder: Path, needed: Sequence[str]) -> dict[str, Path]:
    """Returns the files under a folder by their path in it; raises ValueError when one that is needed is missing."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    files = {place: path for place, path in files.items() if not set(Path(place).parts) & set(LEFT_OUT)}
    missing = [name for name in needed if name not in files]
    if missing:
        raise ValueError(f"{folder} has no {', '.join(missing)}")
    return files


def check_card(kind: str, files: dict[str, Path]) -> None:
    """Raises ValueError when the README's front matter lacks what the Hub finds this kind of repository by."""
    card = ModelCard.load(files["README.md"], ignore_metadata_errors=False).data.to_dict()
    for key, wanted in CARDS[kind].items():
        have = card.get(key)
        if have is None or (wanted is not None and wanted not in have):
            raise ValueError(f"{files['README.md']}: front matter needs {key}: {wanted or '...'}, and it is {have!r}")


def push(api: HfApi, options: argparse.Namespace, files: dict[str, Path]) -> str:
    """Returns the address of the repository, after one commit with all files."""
    from huggingface_hub import CommitOperationAdd

    kind = "space" if options.kind == "space" else "model"
    sdk = "gradio" if kind == "space" else None
    url = api.create_repo(options.repository, repo_type=kind, private=not options.public, exist_ok=True, space_sdk=sdk)
    added = [CommitOperationAdd(place, path) for place, path in sorted(files.items())]
    api.create_commit(options.repository, added, commit_message=options.message, repo_type=kind)
    return str(url)


if __name__ == "__main__":
    sys.exit(main())
