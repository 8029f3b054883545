"""Tapped hidden states of whole texts from the stock model, as training and replays need them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_dcut.drafters.training.answers import Answer
from hf_dcut.drafters.training.tap_cache import ReadTaps
from hf_dcut.target import tapped_layers


@contextmanager
def tap_reader(model: PreTrainedModel, taps: Sequence[int], final: bool = False) -> Iterator[ReadTaps]:
    """Gives a function from answers to their taps [tokens, F], one answer behind the other.

    Args:
        model: the target.
        taps: decoder layers, from 0, whose outputs stand side by side in a row.
        final: whether the states that the model's head reads follow behind them.

    Raises:
        ValueError: the model shows no decoder layers, or has fewer.
    """
    layers, outputs = tapped_layers(model, taps), dict[int, Tensor]()

    def keep(index: int) -> Callable[[nn.Module, object, Any], None]:
        return lambda module, inputs, output: outputs.update(
            {index: output[0] if isinstance(output, tuple) else output}
        )

    @torch.no_grad()
    def read(answers: Sequence[Answer]) -> Tensor:
        device, longest = model.get_input_embeddings().weight.device, max(map(len, answers))
        # Padded on the right, where a causal model does not look; no mask, so attention may take its fastest path.
        ids = torch.tensor([[*a.ids, *[0] * (longest - len(a))] for a in answers], device=device)
        last = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        rows = torch.cat([*(outputs[tap] for tap in taps), *([last] if final else [])], dim=-1)
        outputs.clear()
        return torch.cat([row[: len(a)] for row, a in zip(rows, answers, strict=True)])

    with ExitStack() as hooks:
        for tap in set(taps):
            hooks.callback(layers[tap].register_forward_hook(keep(tap)).remove)
        yield read
