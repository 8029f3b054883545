"""Every Triton kernel becomes machine code for sm_80 and sm_90 without a GPU, within the shared memory of these.

Run as a program (the tests do so, since a process either interprets kernels or compiles them) it prints one JSON line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

# Bytes of shared memory that a block may take; code for sm_80 also runs on sm_86 and sm_89, which have the least.
SHARED = {80: 99 * 1024, 90: 227 * 1024}
POINTERS = {"count": "i64", "room": "i64", "survival": "fp32", "rank": "i32", "token": "i64", "anchor": "i64"}
POINTERS |= {
    "slot": "i64",
    "length": "i64",
    "rope": "i64",
    "budgets": "i64",
    "curve": "fp64",
    "belief": "fp64",
    "keep": "i8",
}
POINTERS |= {"columns": "i64", "numbers": "i64", "start": "i32", "used": "i32", "begin": "i32", "ancestors": "i8"}
POINTERS |= {"index": "i64", "logprob": "fp32", "weight": "fp32"}


def kernels() -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """Yields name, kernel, dtypes of further pointers, constants and options of each variant that is compiled."""
    import torch

    from hf_dcut.kernels.fused import argmax_logprob, packed_attention, select

    for rows, width, warps in ((1, 2, 4), (64, 16, 4), (256, 32, 8)):
        options = {"num_warps": warps, "enable_fp_fusion": False}
        constants = {"ROWS": rows, "BLOCK": min(rows, 32)}
        yield f"rank {rows}", select.rank_kernel, {"confidence": "fp32"}, constants, options
        constants = {"ROWS": rows, "WIDTH": width, "PLACES": rows * width, "QUANTUM": select.QUANTUM}
        yield f"choose {rows}x{width}", select.choose_kernel, {}, constants, options
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    fusion = {"enable_fp_fusion": True}
    for name in names.values():
        yield f"argmax {name}", argmax_logprob.argmax_logprob_kernel, {"logits": name}, {"BLOCK": 4096}, fusion
    everything = dict.fromkeys(("SOFTCAP", "SINKS", "WINDOW"), True)
    tree = {"ANCESTORS": True, "SPLIT": True}
    for dtype, size, flags in (
        (torch.bfloat16, 128, {}),
        (torch.bfloat16, 128, {"SPLIT": True}),
        (torch.bfloat16, 128, everything),
        (torch.float16, 80, tree),
        (torch.bfloat16, 256, tree),
        (torch.float32, 64, everything),
        (torch.float32, 256, tree),
    ):
        rows, cells, warps = packed_attention._blocks(dtype, size, 64)
        block = 1 << (size - 1).bit_length()
        constants = {"KV_HEADS": 8, "GROUP": 4, "DIM": size, "VALUE_DIM": size, "BLOCK_ROWS": rows}
        constants |= {"BLOCK_CELLS": cells, "BLOCK_DIM": block, "BLOCK_VALUE": block, "INTERPRETED": False}
        constants |= dict.fromkeys(("WINDOW", "SOFTCAP", "SINKS", "ANCESTORS", "SPLIT"), False) | flags
        pointers = dict.fromkeys(("query", "key", "value", "sinks", "out"), names[dtype])
        pointers |= {"out": "fp32"} if flags.get("SPLIT") else {}
        options = {"num_warps": warps, "num_stages": 2, **fusion}
        yield (
            " ".join(["attend", names[dtype], str(size), *flags]),
            packed_attention.attend_kernel,
            pointers,
            constants,
            options,
        )
    constants = {"VALUE_DIM": 80, "BLOCK_VALUE": 128, "BLOCK_PARTS": 32}
    yield "join", packed_attention.join_kernel, {"part": "fp32", "out": "bf16"}, constants, fusion


def compile_all(architecture: int) -> dict[str, dict[str, int]]:
    """Returns bytes of machine code and shared memory of each variant."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    found = {}
    for name, kernel, further, constants, options in kernels():
        pointers = {**POINTERS, **further}
        floats = dict.fromkeys(("scaling", "softcap"), "fp32")
        types = {
            argument: "constexpr"
            if argument in constants
            else f"*{pointers[argument]}"
            if argument in pointers
            else floats.get(argument, "i32")
            for argument in kernel.arg_names
        }
        # As at a launch: memory is aligned, and so are rows of heads.
        aligned = [
            i for i, n in enumerate(kernel.arg_names) if n in pointers or n.startswith(("query_", "key_", "value_"))
        ]
        source = ASTSource(
            fn=kernel,
            signature=types,
            constexprs=constants,
            attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
        )
        binary = compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
        found[name] = {"code": len(binary.asm["cubin"]), "shared": binary.metadata.shared}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SHARED)
def test_compiles(architecture: int) -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = [sys.executable, "-P", __file__, str(architecture)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 17
    assert all(sizes["code"] for sizes in found.values())
    assert {name: sizes for name, sizes in found.items() if sizes["shared"] > SHARED[architecture]} == {}


if __name__ == "__main__":
    print(json.dumps(compile_all(int(sys.argv[1]))))  # noqa: T201 (the parent reads it)
