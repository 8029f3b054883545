"""Gated DeltaNet layers in packed rows leave the states that stepping through the stock model leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    KimiLinearConfig,
    MiniMaxConfig,
    OlmoHybridConfig,
    PreTrainedConfig,
    PreTrainedModel,
    RecurrentGemmaConfig,
    RwkvConfig,
)

from hf_dcut import recurrence
from hf_dcut.acceptance import accept
from hf_dcut.cache import SlotCache
from hf_dcut.packing import Chunk, join, pack, pack_plain
from hf_dcut.recurrence import delta_layers, packed_recurrence
from hf_dcut.target import Target
from hf_dcut.trial import check_model
from hf_dcut.types import Batch, Cut, Drafts, Packed

KINDS = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
D, LENGTH = 4, 256
# Relative differences. In float32 the chunked rule for prompts and the rounding of norms add up over a few layers of
# large weights; a token that is taken in or left out by mistake makes 1e-2 and more.
ALLOWED = {torch.float64: 1e-11, torch.float32: 2e-5}
Builder = Callable[..., PreTrainedModel]


class Wide(TorchFunctionMode):
    """Lets models in float64 stay in it where their code computes in float32: norms, softmax and the delta rule."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        narrow = func is torch.Tensor.to and torch.float32 in (*args[1:], *kwargs.values())
        if (narrow or func is torch.Tensor.float) and args[0].dtype == torch.float64:
            return args[0].contiguous()
        if kwargs.get("dtype") == torch.float32 and func is torch.nn.functional.softmax:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@pytest.fixture
def wide() -> Iterator[None]:
    with Wide():
        yield


class Slots:
    """Texts in the slots of a cache, and beside it a cache of Transformers for each, filled token by token."""

    def __init__(self, model: PreTrainedModel, slots: int):
        self.target = Target(model)
        self.cache = SlotCache(self.target.shapes, slots, LENGTH, model.dtype, "cpu")
        self.texts: list[list[int]] = [[] for _ in range(slots)]
        self.stock = [DynamicCache(config=model.config) for _ in range(slots)]

    @torch.no_grad()
    def run(self, packed: Packed) -> torch.Tensor:
        """Returns logits [L, V], nothing of which is committed yet."""
        return self.target.forward(packed, self.cache)[0]

    @torch.no_grad()
    def feed(self, slot: int, tokens: Sequence[int], together: bool = False) -> torch.Tensor:
        """Returns the stock logits [n, V] of tokens that become part of a text, one at a time or all at once."""
        self.texts[slot] += tokens
        pieces = torch.tensor([tokens]).split(len(tokens) if together else 1, dim=1)
        options = {"cache": self.stock[slot], "use_cache": True}
        return torch.cat([self.target.model(piece, **options).logits[0] for piece in pieces])

    def batch(self, slots: int, anchors: Sequence[int]) -> Batch:
        zeros = torch.zeros(slots, dtype=torch.int64)
        length, anchor = (torch.tensor(x, dtype=torch.int64) for x in (list(map(len, self.texts[:slots])), anchors))
        return Batch(torch.arange(slots), length, anchor, zeros + 99, zeros, zeros)

    def check(self, slot: int) -> None:
        """Asserts that a slot's states are those of the stock cache."""
        for own, stock in zip(self.cache.layers, self.stock[slot].layers, strict=True):
            if own in self.cache.states:
                self.same(own.state[slot], stock.recurrent_states[0][0])
                self.same(own.window[slot].T, stock.conv_states[0][0, :, 1:])

    def same(self, one: torch.Tensor, other: torch.Tensor) -> None:
        """Asserts that two tensors are equal but for rounding."""
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert float((one - other).norm() / other.norm()) <= ALLOWED[one.dtype]


def random_tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 101, shape, generator=torch.Generator().manual_seed(seed))


def block(slots: Slots, rows: int, seed: int, kept: Sequence[int] | None = None) -> tuple[Packed, torch.Tensor]:
    """Returns the packed row of drafts for the first slots; the anchor and the drafts of each, int64 [rows, D + 1]."""
    tokens = random_tokens(rows, D + 1, seed=seed)
    keep = torch.arange(D) < torch.tensor(kept or [D] * rows)[:, None]
    drafts = Drafts.chain(tokens[:, 1:], torch.ones(rows, D))
    cut = Cut(keep, rows + int(keep.sum()), 1.0, (D,) * rows)
    return pack(drafts, cut, slots.batch(rows, tokens[:, 0].tolist()), LENGTH), tokens


def settle(slots: Slots, packed: Packed, accepted: Sequence[int]) -> None:
    """Commits a row in which the target's choices agree with so many drafts of each decoding request."""
    after = packed.token.roll(-1).clone()
    start = packed.start.tolist()
    for row, (first, count) in enumerate(zip(start, accepted, strict=False)):
        assert first + count < start[row + 1], "more accepted than kept"
        after[first + count] = -5
    verdict = accept(after[packed.logit_rows], packed)
    assert verdict.accepted[: packed.decoding].tolist() == list(accepted)
    slots.cache.commit(verdict, packed)


def read(slots: Slots, lengths: Sequence[int]) -> None:
    """Reads a prompt into each slot."""
    prompts = [random_tokens(n, seed=50 + n).tolist() for n in lengths]
    none = pack_plain(slots.batch(0, []), LENGTH)
    packed = join(none, [Chunk(torch.tensor(prompt), slot, 0, 0, last=True) for slot, prompt in enumerate(prompts)])
    slots.run(packed)
    settle(slots, packed, [])
    for slot, prompt in enumerate(prompts):
        slots.feed(slot, prompt, together=True)


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("kind", KINDS)
def test_states_after_rejection_at_every_offset_are_those_of_stepping(make_target: Builder, kind: str) -> None:
    slots = Slots(make_target(kind), 8)
    read(slots, [3, 1, 7, 2, 5, 4, 9, 6])
    for step in range(D + 1):
        kept = [(row + 2 * step) % (D + 1) for row in range(8)] if step else [D] * 8
        accepted = [min((row + step) % (D + 1), kept[row]) for row in range(8)]
        packed, tokens = block(slots, 8, seed=step, kept=kept)
        logits = slots.run(packed)
        settle(slots, packed, accepted)
        for row, (count, first) in enumerate(zip(accepted, packed.start.tolist(), strict=False)):
            stock = slots.feed(row, tokens[row, : count + 1].tolist())
            slots.same(logits[first : first + count + 1], stock)
            slots.check(row)


@pytest.mark.parametrize("kind", KINDS)
def test_states_in_float32(make_target: Builder, kind: str) -> None:
    slots = Slots(make_target(kind, dtype=torch.float32), 3)
    read(slots, [3, 1, 7])
    for accepted in ([0, 4, 2], [1, 0, 3]):
        packed, tokens = block(slots, 3, seed=sum(accepted))
        slots.run(packed)
        settle(slots, packed, accepted)
        for row, count in enumerate(accepted):
            slots.feed(row, tokens[row, : count + 1].tolist())
            slots.check(row)


PIECES = [[150], [1, 1, 148], [2, 63, 1, 84], [64, 64, 22]]


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize(
    ("kind", "sizes"), [*product(["qwen3_5"], PIECES), ("qwen3_5_moe", [70, 80]), ("qwen3_next", [3, 2])]
)
def test_prompts_are_read_in_pieces_beside_requests_that_decode(
    make_target: Builder, kind: str, sizes: Sequence[int]
) -> None:
    slots = Slots(make_target(kind), 4)
    read(slots, [3, 1])
    prompts = [random_tokens(sum(sizes), seed=90 + n).tolist() for n in range(2)]
    begun = 0
    for step, size in enumerate(sizes):
        decoding, tokens = block(slots, 2, seed=step, kept=[D, 2])
        chunks = [
            Chunk(torch.tensor(p[begun : begun + size]), 2 + n, begun, 0, last=True) for n, p in enumerate(prompts)
        ]
        packed = join(decoding, chunks)
        logits = slots.run(packed)
        settle(slots, packed, [step % D, 1])
        for row, count in enumerate([step % D, 1]):
            slots.feed(row, tokens[row, : count + 1].tolist())
            slots.check(row)
        begun += size
    for n, prompt in enumerate(prompts):
        stock = slots.feed(2 + n, prompt, together=True)
        slots.same(logits[n - 2], stock[-1])
        slots.check(2 + n)


@pytest.mark.usefixtures("wide")
def test_plain_steps(make_target: Builder) -> None:
    slots = Slots(make_target("qwen3_next"), 2)
    read(slots, [2, 6])
    for step in range(3):
        anchors = random_tokens(2, seed=step).tolist()
        packed = pack_plain(slots.batch(2, anchors), LENGTH)
        logits = slots.run(packed)
        settle(slots, packed, [0, 0])
        stock = torch.cat([slots.feed(row, [anchor]) for row, anchor in enumerate(anchors)])
        slots.same(logits, stock)
        slots.check(0)
        slots.check(1)


@pytest.mark.usefixtures("wide")
def test_a_step_that_was_not_committed_can_be_done_again(make_target: Builder) -> None:
    slots = Slots(make_target("qwen3_5"), 3)
    read(slots, [2, 6])
    decoding, tokens = block(slots, 2, seed=0)
    packed = join(decoding, [Chunk(torch.tensor([5, 6, 7]), 2, 0, 0, last=True)])
    first = slots.run(packed)
    other, _ = block(slots, 2, seed=1)
    slots.run(other)
    assert torch.equal(slots.run(packed), first)
    settle(slots, packed, [1, 3])
    for row, count in enumerate([1, 3]):
        slots.feed(row, tokens[row, : count + 1].tolist())
        slots.check(row)


def test_only_packed_forwards_of_the_thread_run_differently(make_target: Builder) -> None:
    slots = Slots(make_target("qwen3_5"), 2)
    ids = random_tokens(2, 9)
    with torch.no_grad():
        before = slots.target.model(ids).logits
        packed, _ = block(slots, 2, seed=0)
        with packed_recurrence(packed), ThreadPoolExecutor(1) as pool:
            forward = torch.no_grad()(slots.target.model)
            assert torch.equal(pool.submit(forward, ids).result().logits, before)
        assert torch.equal(slots.target.model(ids).logits, before)


def test_layers_get_their_own_forward_back(make_target: Builder) -> None:
    model = make_target("qwen3_5")
    layer = type(delta_layers(model)[0])
    recurrence.disable()
    own = layer.forward
    Target(model)
    Target(model)
    assert layer.forward is not own
    recurrence.disable()
    assert layer.forward is own
    check_model(model)
    Target(model)
    assert layer.forward is not own, "adopted anew, although the model was checked before"


def test_a_layer_that_was_replaced_is_refused(make_target: Builder) -> None:
    model = make_target("qwen3_5")
    layer = delta_layers(model)[0]
    recurrence.disable()
    layer.forward = layer.forward  # as kernels of a whole layer are put in: on the object, where ours is not looked for
    with pytest.raises(ValueError, match=r"Qwen3_5ForCausalLM cannot run packed rows.*without dcut"):
        check_model(model)


SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
MIXED = ["linear_attention", "full_attention"]
REFUSED: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "lightning attention": (
        lambda: MiniMaxConfig(**SIZES, **HEADS, layer_types=MIXED, num_local_experts=2),
        "MiniMaxLightningAttention",
    ),
    "olmo's delta net": (
        lambda: OlmoHybridConfig(**SIZES, num_attention_heads=4, layer_types=MIXED),
        "OlmoHybridGatedDeltaNet",
    ),
    "rwkv": (lambda: RwkvConfig(**SIZES, attention_hidden_size=64), "RwkvSelfAttention"),
    "griffin": (
        lambda: RecurrentGemmaConfig(**SIZES, num_attention_heads=4, lru_width=64, block_types=["recurrent"]),
        "RecurrentGemmaRecurrentBlock",
    ),
    "kimi": (lambda: KimiLinearConfig(**SIZES, num_attention_heads=4), "KimiLinearDeltaAttention"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_recurrent_layers_are_refused_by_name(case: str) -> None:
    config, names = REFUSED[case]
    model = AutoModelForCausalLM.from_config(config())
    with pytest.raises(
        ValueError, match=rf"{type(model).__name__} keeps a recurrent state.*{names}.*Gated DeltaNet.*without dcut"
    ):
        check_model(model)
