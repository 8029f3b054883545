"""`Trainer`: the loop of training, in one process or several, which can be killed at any time and goes on.

Everything a step depends on is in its number, the recipe, the data and the saved state (weights and the optimizer's
moments, in full precision), so a run that goes on equals one that was never stopped. Only a time budget makes a run
depend on the clock.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from hf_dcut.drafters.dflash.model import DFlashModel
from hf_dcut.drafters.training.answers import Answer, Piece, pieces
from hf_dcut.drafters.training.batches import TrainingBatch, collate
from hf_dcut.drafters.training.blocks import BlockDrafts
from hf_dcut.drafters.training.calibrate import best_multiplier
from hf_dcut.drafters.training.loss import block_loss, place_weights
from hf_dcut.drafters.training.recipe import Recipe
from hf_dcut.drafters.training.teacher import Teacher

STATE, METRICS = "state.pt", "metrics.jsonl"


class LossOfBatch(nn.Module):
    """What Accelerate prepares: its forward returns the loss and the counts of a batch."""

    def __init__(self, drafts: BlockDrafts, decay: float, soft: float):
        super().__init__()
        self.drafts, self.decay, self.soft = drafts, decay, soft

    def forward(self, batch: TrainingBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the weighted loss, the weights' sum, and how many drafts of each place are right, float32 [D]."""
        weight = place_weights(batch.label.shape[-1], self.decay, batch.label.device) * (batch.label >= 0)
        teacher = None if batch.states is None else Teacher(batch.states, self.drafts.target_head, self.soft)
        loss, right = block_loss(self.drafts.hidden(batch), self.drafts.head, batch.label, weight, teacher)
        return loss, weight.sum(), right.flatten(0, -2).sum(0)


class Trainer:
    """Trains a drafter's weights in place.

    Args:
        model: the weights, in float32 or float64.
        target: whose embeddings and head the drafter uses.
        answers: to learn from.
        held_out: to be measured on.
        taps: gives the taps [tokens, F] of an answer; with `recipe.soft`, what the target's head reads behind them.
        recipe: the numbers.
        folder: where state and metrics go.
        accelerator: the processes; a new one when None.
    """

    def __init__(
        self,
        model: DFlashModel,
        target: PreTrainedModel,
        answers: Sequence[Answer],
        held_out: Sequence[Answer],
        taps: Callable[[Answer], Tensor],
        recipe: Recipe,
        folder: str | os.PathLike[str],
        accelerator: Accelerator | None = None,
    ):
        self.model, self.recipe, self.folder = model, recipe, Path(folder)
        self.answers, self.held_out, self.taps = answers, held_out, taps
        self.accelerator = accelerator or open_accelerator()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.depth = model.config.block_size - 1
        self.to_draft = to_draft(model)
        model.to(self.accelerator.device).requires_grad_(True).train()
        dtype = torch.bfloat16 if recipe.precision == "bf16" else model.fc.weight.dtype
        decay = recipe.decay or model.config.block_size / 2
        loss = LossOfBatch(BlockDrafts(model, target, dtype), decay, recipe.soft)
        self.width = model.fc.in_features if recipe.soft else None
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
        )
        self.loss, self.optimizer = self.accelerator.prepare(loss, optimizer)
        self.step, self.spent = 0, 0.0

    def run(self, seconds: float | None = None) -> None:
        """Trains to the last step and saves.

        Args:
            seconds: stop after so many, counted from now, with the learning rate running out then; None for no limit.
        """
        if self.recipe.steps is None and seconds is None:
            raise ValueError("steps=None and no time limit: give one of them, or training never ends")
        begin, before = time.monotonic(), self.spent
        limit = math.inf if seconds is None else before + seconds
        bar = tqdm(total=self.recipe.steps, initial=self.step, desc="train", unit="step", disable=self._bar_off)
        for rows in self._batches():
            self.spent = before + time.monotonic() - begin
            if self.step == self.recipe.steps or self._any_process(self.spent >= limit):
                break
            metrics = self._train_step(rows, self.recipe.rate(self.step, self.spent / limit))
            self.step += 1
            bar.update()
            bar.set_postfix({k: f"{metrics[k]:.3f}" for k in ("loss", "first")})
            self._log(metrics)
            if self.step % self.recipe.evaluate_every == 0:
                self._log({"held_out": self.held_out_tokens()})
            if self.step % self.recipe.save_every == 0:
                self.save()
        bar.close()
        self.save()

    def _train_step(self, rows: Sequence[Piece], rate: float) -> dict[str, float]:
        """Returns the metrics of one step."""
        processes, rank = self.accelerator.num_processes, self.accelerator.process_index
        batch = self._collate(rows[rank::processes], self.answers)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss, weight, right = self.loss(batch)
        totals = self.accelerator.reduce(torch.stack([loss.detach(), weight, right[0].to(loss.dtype)]))
        # Processes average their gradients; the loss is one mean over the drafts of all of them.
        self.accelerator.backward(loss * processes / totals[1])
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        blocks = sum(len(row.anchors) for row in rows)
        total, weights, first = totals.tolist()
        return {
            "loss": total / weights,
            "first": first / blocks,
            "norm": float(norm),
            "rate": rate,
            "blocks": blocks,
        }

    @torch.no_grad()
    def held_out_tokens(self) -> dict[str, float]:
        """Returns tokens a step on the held-out answers, the target's own included, and the share of right firsts."""
        steps, tokens, right, blocks = 0, 0, 0, 0
        self.loss.eval()
        for index, answer in enumerate(self.held_out):
            if not len(answer.anchors):
                continue
            accepted = self._accepted(index)
            right, blocks = right + int((accepted > 0).sum()), blocks + len(accepted)
            place = 0
            while place < len(accepted):
                steps, taken = steps + 1, int(accepted[place]) + 1
                place, tokens = place + taken, tokens + taken
        self.loss.train()
        return {"tokens": tokens / max(steps, 1), "first": right / max(blocks, 1)}

    def _accepted(self, index: int) -> Tensor:
        """Returns how many drafts of the block at each anchor of a held-out answer are right, int64 [anchors]."""
        blocks = self._held_out_blocks(index)
        return torch.cat([(logits.argmax(-1) == label).int().cumprod(-1).sum(-1) for logits, label in blocks])

    def _held_out_blocks(self, index: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields logits [n, D, draft vocabulary] and labels [n, D] of the blocks of a held-out answer, n at a time."""
        drafts = self.loss_module.drafts
        for part in torch.tensor(self.held_out[index].anchors).split(self.recipe.anchors * 4):
            batch = self._collate([Piece(index, tuple(part.tolist()))], self.held_out)
            yield drafts.head(drafts.hidden(batch))[0], batch.label[0]

    @torch.no_grad()
    def fit_multiplier(self) -> float:
        """Returns by what logits must be multiplied for survivals to tell what held-out blocks have accepted."""
        self.loss.eval()
        indices = [index for index, answer in enumerate(self.held_out) if len(answer.anchors)]
        found = best_multiplier(block for index in indices for block in self._held_out_blocks(index))
        self.loss.train()
        return found

    @property
    def loss_module(self) -> LossOfBatch:
        """The module below what Accelerate wraps around it."""
        module = self.accelerator.unwrap_model(self.loss)
        assert isinstance(module, LossOfBatch)
        return module

    def save(self) -> None:
        """Writes the state, so that a kill at any time leaves a whole one behind."""
        if not self.accelerator.is_main_process:
            return
        state = {
            "step": self.step,
            "spent": self.spent,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        draft = self.folder / f"{STATE}.tmp"
        torch.save(state, draft)
        os.replace(draft, self.folder / STATE)

    def resume(self) -> None:
        """Goes on from the saved state.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is of another drafter.
        """
        path = self.folder / STATE
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: there is no run to resume in {self.folder}")
        state = torch.load(path, map_location=self.accelerator.device, weights_only=True)
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise ValueError(f"{path} is the state of another drafter: {error}") from error
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.spent = state["step"], state["spent"]

    def _batches(self) -> Iterator[list[Piece]]:
        """Yields the rows of each step from the current one on; those an epoch has left over are left out."""
        first = len(pieces(self.answers, self.recipe.anchors, self.recipe.seed, 0)) // self.recipe.batch
        if not first:
            raise ValueError(
                f"batch={self.recipe.batch}: the answers have fewer rows of up to {self.recipe.anchors} anchors. "
                "Give more answers or a smaller batch"
            )
        epoch, skip = divmod(self.step, first)
        while True:
            rows = pieces(self.answers, self.recipe.anchors, self.recipe.seed, epoch)
            for index in range(skip, first):
                yield rows[index * self.recipe.batch : (index + 1) * self.recipe.batch]
            epoch, skip = epoch + 1, 0

    def _collate(self, rows: Sequence[Piece], answers: Sequence[Answer]) -> TrainingBatch:
        batch = collate(rows, answers, self.taps, self.depth, self.to_draft, self.width)
        return batch.to(self.accelerator.device)

    def _any_process(self, late: bool) -> bool:
        """Returns whether it holds in any process, the same answer in all."""
        if self.accelerator.num_processes == 1:
            return late
        return bool(self.accelerator.reduce(torch.tensor(float(late), device=self.accelerator.device)) > 0)

    def _log(self, values: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            with open(self.folder / METRICS, "a", encoding="utf-8") as lines:
                lines.write(json.dumps({"step": self.step, "seconds": round(self.spent, 1), **values}) + "\n")

    @property
    def _bar_off(self) -> bool | None:
        """None lets the bar show on a terminal only."""
        return None if self.accelerator.is_main_process else True


def open_accelerator() -> Accelerator:
    """Returns the processes that were launched together; one that waits for another's answers does so for hours."""
    # Without a GPU, Accelerate joins processes only when it is told to use the CPU.
    waits = InitProcessGroupKwargs(timeout=timedelta(hours=12))
    return Accelerator(cpu=not torch.accelerator.is_available(), kwargs_handlers=[waits])


def to_draft(model: DFlashModel) -> Tensor | None:
    """Returns the draft token of each token, int64 [V], -1 where there is none; None for the whole vocabulary."""
    ids = model.draft_ids()
    if ids is None:
        return None
    size, ids = model.config.vocab_size, ids.cpu()
    assert size is not None, "a draft vocabulary without it is refused at load"
    return torch.full((size,), -1).scatter(0, ids, torch.arange(len(ids)))
