"""DFlash's proposals against plain loops in float64, written from the paper's equations."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from hf_dcut.branching import parents
from hf_dcut.drafters.dflash import DFlashDrafter, DFlashModel
from hf_dcut.types import Batch, Committed, Drafts

# Logits are rounded to float32 before the softmax, as the target's are; everything before is float64.
CONFIDENCE = 1e-5
# Transformers computes the frequencies of scaled RoPE in float32: angles are off in the seventh digit.
SCALED_ROPE = 1e-4
EXACT = 1e-11


# The oracle: one row at a time, one head at a time, one number at a time where order matters.


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / math.sqrt(sum(float(v) ** 2 for v in x) / len(x) + eps) * weight


def frequency(i: int, config: Any) -> float:
    """Returns the i-th rotary frequency, by the formulas of the papers that introduced each scaling."""
    plain = config.rope_theta ** (-2.0 * i / config.rotary_dim)
    rope = config.rope_scaling or {"rope_type": "default"}
    if rope["rope_type"] == "linear":
        return plain / rope["factor"]
    if rope["rope_type"] == "yarn":
        # Dimensions that turn often enough within the original length stay, those that turn too seldom are slowed.
        turns = [rope["original_max_position_embeddings"] / (2 * math.pi * beta) for beta in (32, 1)]
        low, high = (config.rotary_dim * math.log(t) / (2 * math.log(config.rope_theta)) for t in turns)
        low, high = max(math.floor(low), 0), min(math.ceil(high), config.rotary_dim - 1)
        slowed = min(max((i - low) / (high - low), 0.0), 1.0)
        return plain * (1 - slowed) + plain / rope["factor"] * slowed
    if rope["rope_type"] == "llama3":
        turns_within = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
        smooth = (turns_within - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        smooth = min(max(smooth, 0.0), 1.0)
        return plain * smooth + plain / rope["factor"] * (1 - smooth)
    return plain


def turn(head: Tensor, position: int, config: Any) -> Tensor:
    """Rotates number i of a head against number i + half, where half of the rotated numbers are."""
    half, out, rope = config.rotary_dim // 2, head.clone(), config.rope_scaling or {}
    scale = 0.1 * math.log(rope["factor"]) + 1 if rope.get("rope_type") == "yarn" else 1.0
    for i in range(half):
        angle = position * frequency(i, config)
        a, b = float(head[i]), float(head[i + half])
        out[i] = scale * (a * math.cos(angle) - b * math.sin(angle))
        out[i + half] = scale * (b * math.cos(angle) + a * math.sin(angle))
    return out


def project(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    out = weights[f"{name}.weight"] @ x
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out


def heads_of(weights: dict[str, Tensor], layer: int, kind: str, x: Tensor, position: int, config: Any) -> list[Tensor]:
    """Returns the heads of a query, key or value of one row."""
    name = f"layers.{layer}.self_attn."
    heads = list(project(weights, f"{name}{kind}_proj", x).split(config.head_dim))
    if kind == "v":
        return [h * config.attention_value_scale for h in heads]
    weight = weights[f"{name}{kind}_norm.weight"]
    return [turn(norm(h, weight, config.rms_norm_eps), position, config) for h in heads]


def sees(config: Any, layer: int, row: int, other: int) -> bool:
    """Returns whether a row at one position sees what is at another."""
    sliding = config.layer_types is not None and config.layer_types[layer] == "sliding_attention"
    causal = sliding if config.is_causal is None else config.is_causal
    if causal and other > row:
        return False
    return not sliding or abs(row - other) < config.sliding_window


def convolve(
    weights: dict[str, Tensor], name: str, side: int, rows: list[Tensor], kernels: list[Tensor]
) -> list[Tensor]:
    """Returns the rows convolved with the base kernel and each row's own, a number a group of channels.

    Args:
        weights: of the drafter.
        name: of the convolution; its kernels are made by `kernel_projection`.
        side: 0 before the sublayer, 1 behind it.
        rows: to convolve.
        kernels: what `kernel_projection` made of the rows before the sublayer.
    """
    base = weights[f"{name}.base_kernel"][side]
    size, width = base.shape
    out = []
    for t, kernel in enumerate(kernels):
        own = kernel.view(2, size, -1)[side]
        group = width // own.shape[1]
        row = torch.zeros(width, dtype=torch.float64)
        for offset in range(min(size, t + 1)):
            for channel in range(width):
                factor = base[offset, channel] + own[offset, channel // group]
                row[channel] += factor * rows[t - offset][channel]
        out.append(row)
    return out


def around(
    weights: dict[str, Tensor], name: str, rows: list[Tensor], sublayer: Callable[[list[Tensor]], list[Tensor]]
) -> list[Tensor]:
    """Returns what a sublayer makes of the rows, between two convolutions if the drafter has them."""
    if f"{name}.base_kernel" not in weights:
        return sublayer(rows)
    kernels = [weights[f"{name}.kernel_projection.weight"] @ row for row in rows]
    return convolve(weights, name, 1, sublayer(convolve(weights, name, 0, rows, kernels)), kernels)


def attend(
    w: dict[str, Tensor],
    layer: int,
    config: Any,
    context: list[Tensor],
    before: list[int],
    rows: list[Tensor],
    start: int,
) -> list[Tensor]:
    """Returns the attention's output for every row of a block that begins at `start`."""
    where = [start + j for j in range(len(rows))]
    seen = list(zip(context + rows, before + where, strict=True))
    keys = [heads_of(w, layer, "k", x, p, config) for x, p in seen]
    values = [heads_of(w, layer, "v", x, p, config) for x, p in seen]
    groups, out = config.num_attention_heads // config.num_key_value_heads, []
    for j, row in enumerate(rows):
        query, gathered = heads_of(w, layer, "q", row, where[j], config), []
        visible = [sees(config, layer, where[j], p) for p in before + where]
        for h, q in enumerate(query):
            score = [
                math.exp(float(q @ key[h // groups]) / math.sqrt(config.head_dim)) * seen
                for key, seen in zip(keys, visible, strict=True)
            ]
            sink = w.get(f"layers.{layer}.self_attn.attention_sink_bias")
            total = sum(score) + (0.0 if sink is None else math.exp(float(sink[h])))
            gathered.append(sum(s / total * v[h // groups] for s, v in zip(score, values, strict=True)))
        out.append(project(w, f"layers.{layer}.self_attn.o_proj", torch.cat(gathered)))
    return out


def feed_forward(w: dict[str, Tensor], layer: int, rows: list[Tensor]) -> list[Tensor]:
    """Returns the MLP's output for every row."""
    out = []
    for x in rows:
        gate, up = (w[f"layers.{layer}.mlp.{name}_proj.weight"] @ x for name in ("gate", "up"))
        out.append(w[f"layers.{layer}.mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up))
    return out


def select(w: dict[str, Tensor], config: Any, y: Tensor, logits: list[float], previous: int) -> tuple[int, float]:
    """Returns the selector's token behind `previous`, and its share among the candidates."""
    best = sorted(range(len(logits)), key=logits.__getitem__)[-config.selector_top_k :]
    state = w["candidate_selector.predecessor_codebook"][previous] * (
        w["candidate_selector.hidden_projection.weight"] @ y
    )
    score = [logits[c] + float(state @ w["candidate_selector.successor_codebook"][c]) for c in best]
    place = max(range(len(score)), key=score.__getitem__)
    return best[place], 1 / sum(math.exp(s - score[place]) for s in score)


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
    embed, head = w.get("embed_tokens.weight", embed), w.get("lm_head.weight", head)
    context = [norm(w["fc.weight"] @ f, w["hidden_norm.weight"], eps) for f in taps]
    mask = w.get("mask_embedding", embed[config.mask_token_id])
    rows = [x * (config.input_embedding_scale or 1) for x in [embed[anchor]] + [mask] * (block - 1)]
    for i in range(config.num_hidden_layers):
        normed = [norm(x, w[f"layers.{i}.input_layernorm.weight"], eps) for x in rows]
        new = around(
            w, f"layers.{i}.attention_conv", normed, lambda n, i=i: attend(w, i, config, context, positions, n, start)
        )
        rows = [x + n for x, n in zip(rows, new, strict=True)]
        normed = [norm(x, w[f"layers.{i}.post_attention_layernorm.weight"], eps) for x in rows]
        new = around(w, f"layers.{i}.mlp_conv", normed, lambda n, i=i: feed_forward(w, i, n))
        rows = [x + n for x, n in zip(rows, new, strict=True)]
    d2t = drafter.model.d2t
    size = len(head) if d2t is None else len(d2t)
    vocabulary = range(size) if d2t is None else [i + int(d2t[i]) for i in range(size)]
    lines = vocabulary if "lm_head.weight" not in w else range(size)
    tokens, confidences = [], []
    for x in rows if config.sample_from_anchor else rows[1:]:
        y = norm(x, w["norm.weight"], eps)
        logits = [float(head[line] @ y) * config.output_multiplier for line in lines]
        if config.final_logit_softcapping is not None:
            cap = config.final_logit_softcapping
            logits = [math.tanh(v / cap) * cap for v in logits]
        if config.selector_rank is None:
            best = max(range(len(logits)), key=logits.__getitem__)
            token, confidence = vocabulary[best], 1 / sum(math.exp(v - logits[best]) for v in logits)
        else:
            token, confidence = select(w, config, y, logits, tokens[-1] if tokens else anchor)
        tokens.append(token)
        confidences.append(confidence)
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
        assert parents(drafts).tolist() == [list(range(-1, depth - 1))] * len(stories)
        assert drafts.count.tolist() == [depth] * len(stories)
        for row, story in enumerate(stories):
            start = len(story.taps) + story.rope
            tokens, confidences = oracle(self.drafter, embed, head, story.taps, story.positions, story.anchor, start)
            assert drafts.token[row].tolist() == tokens
            tolerance = CONFIDENCE if self.drafter.config.rope_scaling is None else SCALED_ROPE
            assert drafts.confidence[row].tolist() == pytest.approx(confidences, rel=tolerance)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


# Two layers of one query each to three cells back, or to all of them.
SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 3}
ALL_SLIDING = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 4}
CONVOLUTIONS = {"conv_kernel_size": 2, "conv_group_size": 16}
SELECTOR = {"selector_rank": 6, "selector_top_k": 5}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# What a published drafter can have that a plain one does not; each is also shown to matter, below.
FEATURES: dict[str, dict[str, Any]] = {
    "windows, causal": SLIDING,
    "windows, two-sided": {**SLIDING, "is_causal": False},
    "windows narrower than the block": {**ALL_SLIDING, "sliding_window": 2, "is_causal": False},
    "causal without windows": {"is_causal": True},
    "yarn": {"rope_scaling": YARN, "rope_theta": 500.0},
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "llama 3 rope": {"rope_scaling": LLAMA3, "rope_theta": 100.0},
    "partial rotary": {"partial_rotary_factor": 0.5},
    "partial rotary, yarn": {"partial_rotary_factor": 0.5, "rope_scaling": YARN, "rope_theta": 500.0},
    "sinks": {"attention_sink_bias": True},
    "sinks and windows": {**SLIDING, "attention_sink_bias": True},
    "scaled values": {"attention_value_scale": 0.6},
    "convolutions": CONVOLUTIONS,
    "convolutions of three rows": {"conv_kernel_size": 3, "conv_group_size": 8},
    "selector": SELECTOR,
    "multiplied logits": {"output_multiplier": 0.3},
    "soft cap": {"final_logit_softcapping": 4.0},
    "scaled embeddings": {"input_embedding_scale": 5.0},
    "shifted labels": {"sample_from_anchor": True},
    "shifted labels, convolutions": {"sample_from_anchor": True, **CONVOLUTIONS},
    "DFlash2": {
        **ALL_SLIDING,
        "is_causal": False,
        **CONVOLUTIONS,
        **SELECTOR,
        "output_multiplier": 0.4,
        "final_logit_softcapping": 6.0,
        "input_embedding_scale": 1.0,
    },
    "MiMo": {
        **ALL_SLIDING,
        "is_causal": False,
        "partial_rotary_factor": 0.5,
        "attention_sink_bias": True,
        "attention_value_scale": 0.612,
    },
}
SHAPES = [
    pytest.param("qwen3", {}, id="plain"),
    pytest.param("llama", {"attention_bias": True, "block_size": 4}, id="biases"),
    pytest.param("llama", {"layers": 1, "taps": (1,)}, id="one layer, one tap"),
    pytest.param("qwen3", {"layers": 3, "taps": (2, 0, 1), "block_size": 2}, id="taps out of order, one draft"),
    pytest.param("qwen3", {"draft_ids": range(1, 101, 3)}, id="draft vocabulary"),
    pytest.param("llama", {"own": ("embed_tokens",)}, id="own embeddings"),
    pytest.param("llama", {"own": ("embed_tokens", "lm_head")}, id="own embeddings and head"),
    pytest.param("qwen3", {"own": ("lm_head",), "draft_ids": range(2, 101, 2)}, id="own head, draft vocabulary"),
    pytest.param("qwen3", {"own": ("mask_embedding",)}, id="own mask"),
    *(pytest.param("llama", {"features": features}, id=name) for name, features in FEATURES.items()),
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
    block = session.drafter.draft_tokens + 1
    session.commit(stories, [1, min(2, block), block])
    session.check(stories)
    session.commit(stories, [block, 1, 1])
    session.check(stories)


@pytest.mark.parametrize(("kind", "options"), SHAPES)
def test_a_given_reach_spares_the_host_read_and_changes_nothing(
    make_target: Any, make_drafter: Any, kind: str, options: dict[str, Any]
) -> None:
    target = make_target(kind)
    session = Session(make_drafter(target, **options), target, slots=3)
    stories = [Story(0), Story(1, rope=6), Story(2)]
    session.commit(stories, [4, 1, 7])
    for rows in (1, 3):
        batch = session.batch(stories[:rows])
        exact, given = (session.bound.propose(replace(batch, reach=reach)) for reach in (None, 40))
        assert torch.equal(exact.token, given.token)
        torch.testing.assert_close(given.confidence, exact.confidence, rtol=CONFIDENCE, atol=0)
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert session.bound.propose(replace(batch, reach=40)).token.shape == exact.token.shape


def without(drafter: DFlashDrafter, features: dict[str, Any]) -> DFlashDrafter:
    """Returns a drafter with the same weights and none of the features."""
    plain = {f.name: f.default for f in fields(drafter.config) if f.name in features and f.name != "rope_theta"}
    model = DFlashModel(replace(drafter.config, **plain)).double().requires_grad_(False)
    names = model.state_dict()
    model.load_state_dict({name: t for name, t in drafter.model.state_dict().items() if name in names})
    return DFlashDrafter(model.eval())


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_every_feature_matters(make_target: Any, make_drafter: Any, features: dict[str, Any]) -> None:
    target = make_target("llama")
    drafter, drafts = make_drafter(target, features=features), []
    for each in (drafter, without(drafter, features)):
        session, stories = Session(each, target, slots=2), [Story(0), Story(1, rope=9)]
        session.commit(stories, [9, 6])
        drafts.append(session.propose(stories))
    with_it, plain = (d.confidence[:, : drafter.config.block_size - 1] for d in drafts)
    assert (with_it - plain).abs().max() > 1e-3


@pytest.mark.parametrize("causal", [True, False])
def test_what_is_outside_the_windows_has_no_influence(make_target: Any, make_drafter: Any, causal: bool) -> None:
    target = make_target("llama")
    # Two layers that see 2 cells back: the first row of the block reaches 4 cells into the context.
    session = Session(
        make_drafter(target, features={**ALL_SLIDING, "sliding_window": 3, "is_causal": causal}), target, 1
    )
    story = Story(0)
    session.commit([story], [9])
    before = session.propose([story]).confidence
    for cell, matters in ((8, True), (7, True), (6, False), (0, False)):
        taps, index = story.taps[cell] * -2, torch.tensor([cell])
        session.bound.observe(Committed(index * 0, index, index, index * 0, taps[None], (), (), (), ()))
        changed = session.propose([story]).confidence
        assert torch.equal(changed, before) != matters, cell
        before = changed


def test_in_a_causal_block_rows_behind_have_no_influence(make_target: Any, make_drafter: Any) -> None:
    target = make_target("llama")
    causal = make_drafter(target, features={"is_causal": True})
    shorter = DFlashDrafter(deepcopy(causal.model))
    shorter.model.config = shorter.config = replace(causal.config, block_size=3)
    shorter.draft_tokens = 2
    story, drafts = Story(0), []
    for drafter in (causal, shorter):
        session = Session(drafter, target, slots=1)
        cells, zeros = torch.arange(4), torch.zeros(4, dtype=torch.int64)
        story.taps = [torch.full((session.width,), 0.3 * i, dtype=torch.float64) for i in range(4)]
        session.bound.observe(Committed(zeros, cells, cells, zeros, torch.stack(story.taps), (), (), (), ()))
        drafts.append(session.propose([story]))
    torch.testing.assert_close(drafts[0].confidence[:, :2], drafts[1].confidence, rtol=1e-6, atol=0)


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


class Tripled(nn.Embedding):
    """An embedding that does something to the rows of its table, as Gemma's does."""

    def forward(self, tokens: Tensor) -> Tensor:
        return 3 * super().forward(tokens)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_drafter_that_asks_for_raw_rows_gets_them(make_target: Any, make_drafter: Any, scale: float) -> None:
    target = make_target("llama")
    drafter, stories = make_drafter(target, features={"input_embedding_scale": scale}), [Story(0)]
    table = target.get_input_embeddings()
    target.set_input_embeddings(Tripled(*table.weight.shape, _weight=table.weight))
    session = Session(drafter, target, slots=1)
    session.commit(stories, [3])
    session.check(stories)
    target.set_input_embeddings(Wrapped(table, lambda x: x))
    with pytest.raises(ValueError, match=r"reads the target's embedding table, and Wrapped has no plain one"):
        drafter.check(target)


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
