"""The forward of training: it drafts what decoding drafts, and looks at nothing it must not see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hf_dcut.drafters import AutoDrafter
from hf_dcut.drafters.dflash import DFlashDrafter
from hf_dcut.drafters.training.answers import Answer, Piece
from hf_dcut.drafters.training.batches import collate
from hf_dcut.drafters.training.blocks import BlockDrafts
from hf_dcut.drafters.training.loss import block_loss, place_weights
from hf_dcut.drafters.training.teacher import Teacher
from hf_dcut.drafters.training.trainer import to_draft
from hf_dcut.types import Batch, Committed

# Logits are rounded to float32 before decoding's softmax; in between everything is float64.
EXACT, CONFIDENCE = 1e-11, 1e-5


def logits_of(drafter: DFlashDrafter, world: object, rows: list[Piece], taps: Callable[[Answer], Tensor]) -> Tensor:
    drafts = BlockDrafts(drafter.model, world.target, drafter.dtype)
    batch = collate(rows, world.answers, taps, drafter.draft_tokens, to_draft(drafter.model))
    with torch.no_grad():
        return drafts.head(drafts.hidden(batch))


def decoded(drafter: DFlashDrafter, world: object, answer: Answer, anchor: int) -> Tensor:
    """Returns what decoding proposes after the tokens before `anchor` were observed, logits [D, C]."""
    bound = drafter.bind(world.target, 1, len(answer) + drafter.draft_tokens)
    cell, zero = torch.arange(anchor), torch.zeros(1, dtype=torch.int64)
    ids = torch.tensor(answer.ids)
    bound.observe(Committed(cell * 0, cell, cell, ids[:anchor], world.taps(answer)[:anchor], (), (), (), ()))
    return bound.propose_logits(Batch(zero, zero + anchor, ids[anchor : anchor + 1], zero + 99, zero, zero))[0][0]


@pytest.mark.parametrize("draft_ids", [None, range(1, 100, 2)])
def test_blocks_are_drafted_as_decoding_drafts_them(make_world, draft_ids) -> None:
    world = make_world()
    drafter = world.drafter(draft_ids=None if draft_ids is None else list(draft_ids))
    rows = [Piece(3, (4, 7, 8, 20)), Piece(1, (2, 5)), Piece(0, (1,))]
    logits = logits_of(drafter, world, rows, world.taps)
    for row, piece in enumerate(rows):
        for place, anchor in enumerate(piece.anchors):
            wanted = decoded(drafter, world, world.answers[piece.index], anchor)
            assert torch.allclose(logits[row, place], wanted, rtol=0, atol=EXACT)


def test_a_saved_drafter_drafts_the_same(make_world, tmp_path: Path) -> None:
    world = make_world(dtype=torch.float32)
    drafter = world.drafter(draft_ids=list(range(2, 90)))
    drafter.save_pretrained(tmp_path)
    loaded = AutoDrafter.from_pretrained(tmp_path)
    logits = logits_of(drafter, world, [Piece(2, (6, 9))], world.taps)[0]
    for place, anchor in enumerate((6, 9)):
        answer = world.answers[2]
        # Blocks of one batch and one alone are multiplied in another order.
        assert torch.allclose(logits[place], decoded(loaded, world, answer, anchor), rtol=0, atol=1e-4)


def test_a_token_at_or_after_the_anchor_changes_no_draft(make_world) -> None:
    world = make_world()
    drafter, anchors = world.drafter(), (6, 9, 14)
    answer = world.answers[3]
    before = logits_of(drafter, world, [Piece(3, anchors)], world.taps)[0]
    for place, anchor in enumerate(anchors):
        # Another text from the token behind the anchor on, and other taps from the anchor on.
        other = [(t * 7 + 11) % 101 for t in answer.ids[anchor + 1 :]]
        changed = replace(answer, ids=(*answer.ids[: anchor + 1], *other))
        world.answers[3] = changed
        taps = world.taps(changed)
        taps[anchor:] = torch.randn(taps[anchor:].shape, generator=torch.Generator().manual_seed(0)).double() * 9
        after = logits_of(drafter, world, [Piece(3, anchors)], lambda a, taps=taps: taps)[0]
        world.answers[3] = answer
        assert torch.equal(after[: place + 1], before[: place + 1])
        assert not torch.allclose(after[place + 1 :], before[place + 1 :]) or place == len(anchors) - 1


def test_a_tap_below_the_anchor_changes_drafts(make_world) -> None:
    world = make_world()
    drafter = world.drafter()
    before = logits_of(drafter, world, [Piece(3, (9,))], world.taps)
    taps = world.taps(world.answers[3])
    taps[8] += 1
    assert not torch.allclose(before, logits_of(drafter, world, [Piece(3, (9,))], lambda a: taps))


def test_other_blocks_and_rows_change_nothing(make_world) -> None:
    world = make_world()
    drafter = world.drafter()
    alone = logits_of(drafter, world, [Piece(3, (9,))], world.taps)[0, 0]
    among = logits_of(drafter, world, [Piece(4, tuple(range(1, 20))), Piece(3, (4, 9, 12))], world.taps)[1, 1]
    assert torch.allclose(alone, among, rtol=0, atol=EXACT)


def test_labels_are_the_tokens_behind_the_anchor() -> None:
    answers = [Answer((10, 11, 12, 13, 14, 15), 2), Answer((20, 21, 22), 1)]
    batch = collate([Piece(0, (2, 4)), Piece(1, (1,))], answers, lambda a: torch.ones(len(a), 3), 3, None)
    assert batch.anchor.tolist() == [[2, 4], [1, 1]]
    assert batch.token.tolist()[0] == [12, 14]
    assert batch.label.tolist() == [[[13, 14, 15], [15, -1, -1]], [[22, -1, -1], [-1, -1, -1]]]
    assert batch.taps.shape == (2, 4, 3)
    only = torch.full((30,), -1)
    only[13], only[15] = 0, 1
    batch = collate([Piece(0, (2, 4))], answers, lambda a: torch.ones(len(a), 3), 3, only)
    assert batch.label.tolist() == [[[0, -1, 1], [1, -1, -1]]]


def test_loss_and_gradient_are_those_of_plain_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 2, 4, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    matrix = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    label = torch.randint(-1, 7, (3, 2, 4), generator=generator)
    weight = place_weights(4, 2.0) * (label >= 0)
    monkeypatch.setattr("hf_dcut.drafters.training.loss._ELEMENTS", {"cpu": 7 * 5})
    loss, right = block_loss(hidden, lambda x: x @ matrix.T, label, weight)
    (gradient,) = torch.autograd.grad(loss * 3, hidden)
    plain = torch.zeros((), dtype=torch.float64)
    for place in range(4):
        for row in range(3):
            for block in range(2):
                if label[row, block, place] >= 0:
                    scores = (hidden[row, block, place] @ matrix.T).log_softmax(-1)
                    plain = plain - scores[label[row, block, place]] * 2.718281828459045 ** (-place / 2)
                    best = int(scores.argmax()) == int(label[row, block, place])
                    assert bool(right[row, block, place]) == best
                else:
                    assert not right[row, block, place]
    # The weights are float32.
    assert torch.allclose(loss, plain, rtol=1e-6)
    (wanted,) = torch.autograd.grad(plain * 3, hidden)
    assert torch.allclose(gradient, wanted, rtol=1e-6, atol=1e-9)


def test_states_stand_where_the_target_makes_the_labels() -> None:
    answers = [Answer((10, 11, 12, 13, 14, 15), 2)]

    def rows(answer: Answer) -> Tensor:
        taps = torch.ones(len(answer), 3)
        return torch.cat([taps, torch.arange(len(answer))[:, None] * torch.ones(1, 2)], dim=-1)

    batch = collate([Piece(0, (2, 4))], answers, rows, 3, None, width=3)
    assert batch.taps.shape == (1, 4, 3)
    assert batch.label.tolist() == [[[13, 14, 15], [15, -1, -1]]]
    assert batch.states is not None
    # The token at position 13 - 10 = 3 is made by the state at 2. Past the end nothing is looked at.
    assert batch.states[..., 0].tolist() == [[[2, 3, 4], [4, 5, 5]]]
    assert collate([Piece(0, (2, 4))], answers, lambda a: torch.ones(len(a), 3), 3, None).states is None


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_a_share_of_the_loss_follows_the_teacher(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    states = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
    matrix = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    other = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    label = torch.tensor([[0, 6, -1], [3, -1, 2]])
    weight = place_weights(3, 2.0) * (label >= 0)
    monkeypatch.setattr("hf_dcut.drafters.training.loss._ELEMENTS", {"cpu": 7 * 2})
    teacher = Teacher(states, lambda x: x @ other.T, share)
    loss, _ = block_loss(hidden, lambda x: x @ matrix.T, label, weight, teacher)
    plain = torch.zeros((), dtype=torch.float64)
    for block in range(2):
        for place in range(3):
            if label[block, place] >= 0:
                scores = (hidden[block, place] @ matrix.T).log_softmax(-1)
                said = (states[block, place] @ other.T).softmax(-1)
                own = share * (said * scores).sum() + (1 - share) * scores[label[block, place]]
                plain = plain - own * 2.718281828459045 ** (-place / 2)
    assert torch.allclose(loss, plain, rtol=1e-6)
    (gradient,), (wanted,) = torch.autograd.grad(loss, hidden), torch.autograd.grad(plain, hidden)
    assert torch.allclose(gradient, wanted, rtol=1e-6, atol=1e-9)
