"""DFlash's proposals against plain loops in float64, written from the paper's equations."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_dcut.drafters.dflash import DFlashDrafter
from hf_dcut.types import Batch, Committed, Drafts

# Logits are rounded to float32 before the softmax, as the target's are; everything before is float64.
CONFIDENCE = 1e-5
EXACT = 1e-11


# The oracle: one row at a time, one head at a time, one number at a time where order matters.


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / math.sqrt(sum(float(v) ** 2 for v in x) / len(x) + eps) * weight


def turn(head: Tensor, position: int, theta: float) -> Tensor:
    """Rotates number i of a head against number i + dim / 2."""
    half, out = len(head) // 2, head.clone()
    for i in range(half):
        angle = position * theta ** (-2.0 * i / len(head))
        a, b = float(head[i]), float(head[i + half])
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def project(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    out = weights[f"{name}.weight"] @ x
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out


def heads_of(weights: dict[str, Tensor], layer: int, kind: str, x: Tensor, position: int, config: Any) -> list[Tensor]:
    """Returns the heads of a query, key or value of one row."""
    name = f"layers.{layer}.self_attn."
    heads = list(project(weights, f"{name}{kind}_proj", x).split(config.head_dim))
    if kind == "v":
        return heads
    weight = weights[f"{name}{kind}_norm.weight"]
    return [turn(norm(h, weight, config.rms_norm_eps), position, config.rope_theta) for h in heads]


def oracle(
    drafter: DFlashDrafter,
    embed: Tensor,
    head: Tensor,
    taps: list[Tensor],
    positions: list[int],
    anchor: int,
    start: int,
) -> tuple[list[int], list[float]]:
    """Returns the drafts after one request's anchor and their confidences.

    Args:
        drafter: read for its weights and config only.
        embed, head: the target's tables.
        taps, positions: of the committed tokens.
        anchor, start: the last token and its position.
    """
    config = drafter.config
    w = {name: t.double() for name, t in drafter.model.state_dict().items() if t.is_floating_point()}
    eps, block = config.rms_norm_eps, config.block_size
    context = [norm(w["fc.weight"] @ f, w["hidden_norm.weight"], eps) for f in taps]
    rows = [embed[anchor]] + [embed[config.mask_token_id]] * (block - 1)
    where = [start + j for j in range(block)]
    groups = config.num_attention_heads // config.num_key_value_heads
    for i in range(config.num_hidden_layers):
        inner = [norm(x, w[f"layers.{i}.input_layernorm.weight"], eps) for x in rows]
        seen = list(zip(context + inner, positions + where, strict=True))
        keys = [heads_of(w, i, "k", x, p, config) for x, p in seen]
        values = [heads_of(w, i, "v", x, p, config) for x, p in seen]
        for j in range(block):
            query, gathered = heads_of(w, i, "q", inner[j], where[j], config), []
            for h, q in enumerate(query):
                score = [math.exp(float(q @ key[h // groups]) / math.sqrt(config.head_dim)) for key in keys]
                gathered.append(sum(s / sum(score) * v[h // groups] for s, v in zip(score, values, strict=True)))
            rows[j] = rows[j] + project(w, f"layers.{i}.self_attn.o_proj", torch.cat(gathered))
            x = norm(rows[j], w[f"layers.{i}.post_attention_layernorm.weight"], eps)
            gate = w[f"layers.{i}.mlp.gate_proj.weight"] @ x
            up = w[f"layers.{i}.mlp.up_proj.weight"] @ x
            rows[j] = rows[j] + w[f"layers.{i}.mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)
    d2t = drafter.model.d2t
    vocabulary = range(len(head)) if d2t is None else [i + int(d2t[i]) for i in range(len(d2t))]
    tokens, confidences = [], []
    for x in rows[1:]:
        y = norm(x, w["norm.weight"], eps)
        logits = [float(head[token] @ y) for token in vocabulary]
        best = max(range(len(logits)), key=logits.__getitem__)
        tokens.append(vocabulary[best])
        confidences.append(1 / sum(math.exp(v - logits[best]) for v in logits))
    return tokens, confidences


@dataclass
class Story:
    """One request: its committed positions with random taps, and its anchor."""

    slot: int
    rope: int = 0
    anchor: int = 7
    taps: list[Tensor] = field(default_factory=list)

    @property
    def positions(self) -> list[int]:
        return [cell + self.rope for cell in range(len(self.taps))]


class Session:
    """Several requests and the bound drafter that serves them."""

    def __init__(self, drafter: DFlashDrafter, target: PreTrainedModel, slots: int, device: str = "cpu"):
        self.drafter, self.target, self.device = drafter, target, device
        self.bound = drafter.bind(target, slots, length=40)
        self.generator = torch.Generator().manual_seed(5)
        self.width = len(drafter.taps) * drafter.config.hidden_size

    def commit(self, stories: list[Story], counts: list[int]) -> None:
        """Commits `counts` new rows to the requests, all in one call, in a shuffled order of requests."""
        slot, cell, position, rows = [], [], [], []
        for story, count in reversed(list(zip(stories, counts, strict=True))):
            for _ in range(count):
                slot.append(story.slot)
                cell.append(len(story.taps))
                position.append(len(story.taps) + story.rope)
                rows.append(torch.randn(self.width, generator=self.generator, dtype=torch.float64) * 3)
                story.taps.append(rows[-1])
            story.anchor = int(torch.randint(4, 101, (), generator=self.generator))
        ints = [torch.tensor(v, dtype=torch.int64, device=self.device) for v in (slot, cell, position)]
        taps = torch.stack(rows).to(self.target.dtype).to(self.device)
        self.bound.observe(Committed(*ints, torch.zeros_like(ints[0]), taps, (), (), (), ()))

    def batch(self, stories: list[Story]) -> Batch:
        columns = [[s.slot for s in stories], [len(s.taps) for s in stories], [s.anchor for s in stories]]
        columns += [[9] * len(stories), [0] * len(stories), [s.rope for s in stories]]
        return Batch(*(torch.tensor(c, dtype=torch.int64, device=self.device) for c in columns))

    def propose(self, stories: list[Story]) -> Drafts:
        drafts = self.bound.propose(self.batch(stories))
        assert [s.slot for s in stories] == list(range(len(stories)))
        return drafts.to("cpu")

    def check(self, stories: list[Story], head: Tensor | None = None) -> None:
        """Compares a proposal with the oracle's, row by row."""
        drafts = self.propose(stories)
        head = self.target.lm_head.weight if head is None else head
        embed, head = (table.double().cpu() for table in (self.target.get_input_embeddings().weight, head))
        depth = self.drafter.draft_tokens
        assert drafts.token.dtype == torch.int64
        assert drafts.confidence.dtype == torch.float32
        assert drafts.token.shape == drafts.confidence.shape == (len(stories), depth)
        assert drafts.parent.tolist() == [list(range(-1, depth - 1))] * len(stories)
        assert drafts.count.tolist() == [depth] * len(stories)
        for row, story in enumerate(stories):
            start = len(story.taps) + story.rope
            tokens, confidences = oracle(self.drafter, embed, head, story.taps, story.positions, story.anchor, start)
            assert drafts.token[row].tolist() == tokens
            assert drafts.confidence[row].tolist() == pytest.approx(confidences, rel=CONFIDENCE)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


SHAPES = [
    pytest.param("qwen3", {}, id="plain"),
    pytest.param("llama", {"attention_bias": True, "block_size": 4}, id="biases"),
    pytest.param("llama", {"layers": 1, "taps": (1,)}, id="one layer, one tap"),
    pytest.param("qwen3", {"layers": 3, "taps": (2, 0, 1), "block_size": 2}, id="taps out of order, one draft"),
    pytest.param("qwen3", {"draft_ids": range(1, 101, 3)}, id="draft vocabulary"),
]


@pytest.mark.parametrize(("kind", "options"), SHAPES)
def test_a_ragged_batch_is_drafted_as_the_equations_say(
    make_target: Any, make_drafter: Any, device: str, kind: str, options: dict[str, Any]
) -> None:
    target = make_target(kind).to(device)
    session = Session(make_drafter(target, **options).to(device), target, slots=3, device=device)
    stories = [Story(0), Story(1, rope=6), Story(2)]
    session.commit(stories, [4, 1, 7])
    session.check(stories)
    # What was drafted is overwritten: nothing accepted, some, all of it.
    block = session.drafter.config.block_size
    session.commit(stories, [1, min(2, block), block])
    session.check(stories)
    session.commit(stories, [block, 1, 1])
    session.check(stories)


def test_context_grows_while_nothing_is_drafted(make_target: Any, make_drafter: Any) -> None:
    target = make_target("llama")
    session, stories = Session(make_drafter(target), target, slots=1), [Story(0)]
    for count in (3, 1, 1, 1, 2):
        session.commit(stories, [count])
    session.check(stories)


def test_spare_rows_write_to_their_scratch_slot_only(make_target: Any, make_drafter: Any) -> None:
    target = make_target("llama")
    session, stories = Session(make_drafter(target), target, slots=3), [Story(0), Story(1)]
    session.commit(stories, [3, 5])
    alone = session.propose(stories)
    batch = session.batch([*stories, Story(2)])
    with_spare = session.bound.propose(batch)
    assert torch.equal(with_spare.token[:2], alone.token)
    session.check(stories)


def test_a_row_does_not_depend_on_its_neighbours(make_target: Any, make_drafter: Any) -> None:
    target = make_target("qwen3")
    drafter = make_drafter(target)
    session, stories = Session(drafter, target, slots=3), [Story(0), Story(1), Story(2)]
    session.commit(stories, [2, 9, 5])
    together = session.propose(stories)
    for row, story in enumerate(stories):
        single = Session(drafter, target, slots=1)
        cells = torch.arange(len(story.taps))
        zeros = torch.zeros_like(cells)
        single.bound.observe(Committed(zeros, cells, cells, zeros, torch.stack(story.taps), (), (), (), ()))
        alone = single.propose([Story(0, 0, story.anchor, story.taps)])
        assert alone.token[0].tolist() == together.token[row].tolist()
        torch.testing.assert_close(alone.confidence[0], together.confidence[row], rtol=1e-6, atol=0)


def test_a_moved_request_goes_on_in_its_new_slot(make_target: Any, make_drafter: Any) -> None:
    target = make_target("llama")
    session = Session(make_drafter(target), target, slots=3)
    stories = [Story(0), Story(1), Story(2)]
    _, second, third = stories
    session.commit(stories, [3, 4, 6])
    session.propose(stories)
    session.bound.free(0)
    session.bound.move(2, 0)
    third.slot = 0
    session.check([third, second])
    # A new request takes the freed slot, which still holds the longer one's K/V.
    fresh = Story(2)
    session.commit([third, second, fresh], [2, 1, 1])
    session.check([third, second, fresh])


def test_stored_context_is_exact_in_float64(make_target: Any, make_drafter: Any) -> None:
    target = make_target("llama")
    drafter = make_drafter(target, attention_bias=True)
    session, story = Session(drafter, target, slots=2), Story(1, rope=3)
    session.commit([story], [5])
    w = drafter.model.state_dict()
    for index, layer in enumerate(session.bound.layers):
        for cell, taps in enumerate(story.taps):
            context = norm(w["fc.weight"] @ taps, w["hidden_norm.weight"], drafter.config.rms_norm_eps)
            for kind, stored in (("k", layer.keys), ("v", layer.values)):
                want = torch.stack(heads_of(w, index, kind, context, cell + 3, drafter.config))
                torch.testing.assert_close(stored[1, cell], want, rtol=EXACT, atol=EXACT)
        assert not layer.keys[0].any()


@pytest.mark.parametrize("target_dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("drafter_dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("draft_ids", [None, range(2, 90)])
def test_target_and_drafter_may_differ_in_dtype(
    make_target: Any, make_drafter: Any, target_dtype: torch.dtype, drafter_dtype: torch.dtype, draft_ids: Any
) -> None:
    target = make_target("llama", dtype=target_dtype)
    session = Session(make_drafter(target, dtype=drafter_dtype, draft_ids=draft_ids), target, slots=2)
    stories = [Story(0), Story(1)]
    session.commit(stories, [6, 3])
    drafts = session.propose(stories)
    assert {layer.keys.dtype for layer in session.bound.layers} == {drafter_dtype}
    exact = make_target("llama", dtype=target_dtype).double()
    widened = DFlashDrafter(deepcopy(session.drafter.model)).to(dtype=torch.float64)
    reference = Session(widened, exact, slots=2)
    for story in stories:
        again = Story(story.slot)
        cells, zeros = torch.arange(len(story.taps)), torch.zeros(len(story.taps), dtype=torch.int64)
        rows = torch.stack(story.taps).to(target_dtype).double()
        reference.bound.observe(Committed(zeros + again.slot, cells, cells, zeros, rows, (), (), (), ()))
    wanted = reference.propose(stories)
    coarse = torch.bfloat16 in (target_dtype, drafter_dtype)
    same = drafts.token == wanted.token
    # bfloat16 has 8 bits, and these weights are large: near ties fall either way, a wrong cast makes all of them wrong.
    assert same.float().mean() >= (0.6 if coarse else 1.0)
    torch.testing.assert_close(
        drafts.confidence[same], wanted.confidence[same], rtol=0.3 if coarse else 1e-3, atol=0.05 if coarse else 1e-5
    )


class Wrapped(nn.Module):
    """A head or an embedding that is more than its weight, as adapters and scaled embeddings are."""

    def __init__(self, inner: nn.Module, change: Callable[[Tensor], Tensor]):
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.inner(x))


@pytest.mark.parametrize("draft_ids", [None, range(0, 101, 2)])
def test_a_head_that_is_no_plain_linear_is_called(make_target: Any, make_drafter: Any, draft_ids: Any) -> None:
    target = make_target("llama")
    drafter, stories = make_drafter(target, draft_ids=draft_ids), [Story(0), Story(1)]
    plain = Session(drafter, target, slots=2)
    plain.commit(stories, [3, 4])
    wanted = plain.propose(stories)
    target.set_output_embeddings(Wrapped(target.lm_head, lambda logits: 2 * logits))
    wrapped = Session(drafter, target, slots=2)
    wrapped.bound.layers = plain.bound.layers
    doubled = wrapped.propose(stories)
    assert torch.equal(doubled.token, wanted.token)
    assert (doubled.confidence > wanted.confidence).all()


def hook(head: nn.Module, calls: list[Any]) -> None:
    head.register_forward_hook(lambda module, args, out: calls.append(out.shape))


def replace_forward(head: nn.Module, calls: list[Any]) -> None:
    """Keeps half of the head's weight, as a rank of tensor parallelism does; the new forward gathers the rest."""
    halves = head.weight.chunk(2)
    head.weight = nn.Parameter(halves[0], requires_grad=False)

    def forward(x: Tensor) -> Tensor:
        out = torch.cat([x @ half.T for half in halves], dim=-1)
        calls.append(out.shape)
        return out

    head.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize("change", [hook, replace_forward])
def test_a_changed_head_is_called_so_that_the_change_takes_part(
    make_target: Any, make_drafter: Any, change: Callable[[nn.Module, list[Any]], None]
) -> None:
    target = make_target("llama")
    drafter, calls = make_drafter(target, draft_ids=range(0, 100, 2)), []
    whole = target.lm_head.weight
    change(target.lm_head, calls)
    session, stories = Session(drafter, target, slots=1), [Story(0)]
    session.commit(stories, [3])
    session.check(stories, whole)
    assert calls == [(1, 4, 101)]


def test_embeddings_are_called_not_indexed(make_target: Any, make_drafter: Any) -> None:
    target = make_target("llama")
    drafter, stories = make_drafter(target), [Story(0)]
    plain = Session(drafter, target, slots=1)
    plain.commit(stories, [3])
    before = plain.propose(stories)
    table = target.get_input_embeddings()
    target.set_input_embeddings(Wrapped(table, lambda x: 8 * x))
    scaled = Session(drafter, target, slots=1)
    scaled.bound.layers = plain.bound.layers
    after = scaled.propose(stories)
    table.weight.mul_(8)
    target.set_input_embeddings(table)
    again = Session(drafter, target, slots=1)
    again.bound.layers = plain.bound.layers
    assert torch.equal(after.confidence, again.propose(stories).confidence)
    assert not torch.equal(after.confidence, before.confidence)


def test_a_new_call_sees_new_target_weights(make_target: Any, make_drafter: Any) -> None:
    target = make_target("llama")
    drafter, stories = make_drafter(target, draft_ids=range(60)), [Story(0)]
    first = Session(drafter, target, slots=1)
    first.commit(stories, [3])
    first.check(stories)
    target.lm_head.weight.copy_(target.lm_head.weight.flip(0))
    second = Session(drafter, target, slots=1)
    second.bound.layers = first.bound.layers
    second.check(stories)


def test_binding_keeps_no_gradient_and_leaves_the_weights_alone(make_target: Any, make_drafter: Any) -> None:
    target = make_target("llama")
    drafter = make_drafter(target)
    before = {name: tensor.clone() for name, tensor in drafter.model.state_dict().items()}
    with torch.enable_grad():
        drafter.model.requires_grad_(True)
        bound = drafter.bind(target, 1, 20)
        assert not bound.context_kv.weight.requires_grad
    session = Session(drafter, target, slots=1)
    stories = [Story(0)]
    session.commit(stories, [3])
    session.propose(stories)
    for name, tensor in drafter.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
