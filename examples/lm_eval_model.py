"""lm-evaluation-harness with a drafter. Needs `pip install hf-dcut[frameworks]`; `make setup` first.

    python examples/lm_eval_model.py run --model hf-dcut --tasks gsm8k --limit 16 \
        --model_args pretrained=models/smollm2-135m-instruct,drafter=examples/drafter,dtype=float32

Importing this file registers the model `hf-dcut`. It is the harness's own `hf` model but for `generate_until`, which
puts all requests of a task into one batch loop instead of batches of equal options. Scores are those of `hf` but for
rounding, which differs between any two batch sizes.
"""

from __future__ import annotations

from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from transformers import GenerationConfig

import hf_dcut


@register_model("hf-dcut")
class DCutLM(HFLM):
    """The harness's `hf` model with drafts.

    Args:
        pretrained: as for `hf`.
        drafter: folder or Hub id of a drafter, "lookup" for drafts from the text itself, or "NAME+lookup" for both.
        dcut: as for `generate`; "auto" by default.
        max_batch_size: requests at once in `generate_until`.
        arguments: others of `hf`.
    """

    def __init__(
        self,
        pretrained: Any,
        drafter: str = "lookup",
        dcut: Any = "auto",
        max_batch_size: int = 32,
        **arguments: Any,
    ):
        super().__init__(pretrained, backend="causal", **arguments)
        if isinstance(self.think_end_token, int):
            raise ValueError(f"think_end_token={self.think_end_token}: give the text of the token")
        self.dcut = dcut
        self.max_concurrent = max_batch_size
        self.drafter = hf_dcut.AutoDrafter.named(drafter, device=self.device)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns the text that follows each context, up to the first of its stop strings."""
        end = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        stops, batch = [], []
        for request in requests:
            context, options = request.args
            options = normalize_gen_kwargs(options, self.max_gen_toks)
            stops.append(handle_stop_sequences(options.pop("until", None), eos=end))
            batch.append(self._request(context, stops[-1], options))
        results = hf_dcut.generate_batch(
            self.model,
            batch,
            assistant_model=self.drafter,
            dcut=self.dcut,
            max_batch_size=self.max_concurrent,
            tokenizer=self.tokenizer,
            progress_bar=not disable_tqdm and self.rank == 0,
        )
        texts = [
            postprocess_generated_text(self.tok_decode(result.generated_tokens), stop, self.think_end_token)
            for result, stop in zip(results.values(), stops, strict=True)
        ]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _request(self, context: str, stop: list[str], options: dict[str, Any]) -> hf_dcut.BatchRequest:
        """Returns the request of a context, shortened on the left as the harness does to make room for the answer."""
        new = options.pop("max_gen_toks")
        if new >= self.max_length:
            raise ValueError(f"max_gen_toks={new} leaves no room for a context: max_length is {self.max_length}")
        if not options["do_sample"]:
            options.pop("temperature", None)
        # Tokenizers whose end token has no text give an empty stop string.
        strings = [text for text in stop if text] or None
        config = GenerationConfig(max_new_tokens=new, stop_strings=strings, pad_token_id=self.tokenizer.pad_token_id)
        unknown = config.update(**options)
        if unknown:
            raise ValueError(f"gen_kwargs {unknown} are no options of generate: leave them out")
        ids = self.tok_encode(context, left_truncate_len=self.max_length - new)
        return hf_dcut.BatchRequest(ids, generation_config=config)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
