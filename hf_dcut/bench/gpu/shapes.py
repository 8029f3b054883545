"""Random models in the shapes of published ones, whose text is worth comparing.

A random model with Transformers' own initialisation says the same token over and over. `varied_model` has weights large
enough that its text depends on all that came before. `chain_model` is the opposite: every token has one successor, by a
wide margin, so that what it must say is known beforehand at any size, while its steps cost what those of any other
model of that shape do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

Shape = dict[str, Any]

QWEN3_8B: Shape = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
SMOLLM2_135M: Shape = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
}
SMALL: Shape = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
}
_NO_END = {"eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0}
# Prime, and no factor of a vocabulary: a text runs through all tokens before it repeats one.
STRIDE = 7919
# Embeddings are so much larger than what the layers add to them, and a token's logit is this much above the others'.
_LOUD, _MARGIN = 64.0, 16.0
# Of a varied model: what a layer's projections do to a normed state, embeddings for each layer, spread of the logits.
_INNER, _BEGIN, _LOGITS = 0.48, 0.09, 2.4


@torch.no_grad()
def varied_model(shape: Shape, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Returns a random Llama whose next token depends on the whole text.

    Weights are as large as they can be before bfloat16's rounding grows from layer to layer: then two right answers
    would differ by more than a tie.
    """
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    config = LlamaConfig(**shape, **_NO_END, initializer_range=_INNER * hidden**-0.5, tie_word_embeddings=False)
    model = _built(LlamaForCausalLM, config, device, dtype)
    model.get_input_embeddings().weight.mul_(_BEGIN * layers**0.5 / config.initializer_range)
    model.get_output_embeddings().weight.mul_(_LOGITS / _INNER)
    return model


@torch.no_grad()
def chain_model(shape: Shape, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Returns a random Qwen3 that says `successors` of the last token.

    The head's row of a token's successor is the embedding of that token, and embeddings are so large that 36 layers
    turn a hidden state by some degrees only.
    """
    config = Qwen3Config(**shape, **_NO_END, initializer_range=0.02, tie_word_embeddings=False)
    model = _built(Qwen3ForCausalLM, config, device, dtype)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    # Drawn anew: Transformers leaves the row of the padding token at zero.
    embedding.normal_(generator=torch.Generator(device).manual_seed(1))
    head.copy_(embedding.roll(STRIDE % len(embedding), 0)).mul_(_MARGIN / config.hidden_size)
    embedding.mul_(_LOUD)
    return model


def successors(last: int, count: int, vocabulary: int) -> list[int]:
    """Returns the `count` tokens that a chain model says after a token."""
    return [(last + STRIDE * (i + 1)) % vocabulary for i in range(count)]


@torch.no_grad()
def chain_margin(model: PreTrainedModel, rows: int = 4, width: int = 32) -> float:
    """Returns the least margin of the successor over all other tokens, in logits, over random texts."""
    vocabulary = model.config.vocab_size
    ids = torch.randint(vocabulary, (rows, width), generator=torch.Generator().manual_seed(0)).to(model.device)
    logits = model(input_ids=ids).logits.float()
    right = ((ids + STRIDE) % vocabulary)[..., None]
    said = logits.gather(-1, right)
    return float((said - logits.scatter(-1, right, -torch.inf).amax(-1, keepdim=True)).min())


def random_prompts(rows: int, shortest: int, longest: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Returns random token ids for each row, rows of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [shortest + row % (longest - shortest + 1) for row in range(rows)]
    return [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def parameters(model: PreTrainedModel, but: Sequence[Tensor] = ()) -> int:
    """Returns how many weights a model has, without those of the tensors `but`."""
    left_out = {id(tensor) for tensor in but}
    return sum(p.numel() for p in model.parameters() if id(p) not in left_out)


def _built(kind: type[PreTrainedModel], config: Any, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Returns the model with weights drawn where it lies; torch's global generators are left alone."""
    with _own_draws(device), torch.device(device):
        torch.manual_seed(0)
        return kind._from_config(config, dtype=dtype).eval().requires_grad_(False)


@contextmanager
def _own_draws(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
