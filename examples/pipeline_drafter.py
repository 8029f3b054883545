"""`pipeline("text-generation")` with a drafter. Run `make setup` first.

`dcut` and the drafter go with the call, like any other option of `generate`; `batch_size` tells how many prompts are
answered at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import TextGenerationPipeline, pipeline

import hf_dcut


def answer(pipe: TextGenerationPipeline, prompts: Sequence[str], drafter: hf_dcut.Drafter, **options: Any) -> list[str]:
    """Returns the text that follows each prompt.

    Args:
        pipe: a text-generation pipeline.
        prompts: texts.
        drafter: who proposes.
        options: others of the pipeline. Without any, pipelines sample at a temperature of 0.7.
    """
    given = {"dcut": True, "batch_size": len(prompts), "return_full_text": False, **options}
    return [rows[0]["generated_text"] for rows in pipe(list(prompts), assistant_model=drafter, **given)]


if __name__ == "__main__":
    pipe = pipeline("text-generation", "models/smollm2-135m-instruct", dtype="float32")
    drafter = hf_dcut.AutoDrafter.from_pretrained("examples/drafter")
    for text in answer(pipe, ["The capital of France is", "One, two,"], drafter, do_sample=False, max_new_tokens=24):
        print(repr(text))
