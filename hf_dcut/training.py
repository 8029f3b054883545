"""`train`: a DFlash drafter for a target, from prompts to a folder that `AutoDrafter.from_pretrained` reads.

    answers     the target's own greedy answers to the prompts, in work/answers-*.jsonl
    taps        its hidden states over them, in work/taps
    training    work/state.pt and work/metrics.jsonl
    the drafter config.json, model.safetensors and README.md in the output folder

Each stage goes on where it was stopped. With several processes (`accelerate launch`) each makes its share of answers
and taps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_dcut.bench.prompts import encode_each, read_prompts
from hf_dcut.bench.replay import replay
from hf_dcut.drafters import AutoDrafter
from hf_dcut.drafters.dflash.model import DFlashModel
from hf_dcut.drafters.training.answers import Answer, frequent_tokens, read_answers, without_loop
from hf_dcut.drafters.training.card import Facts, card
from hf_dcut.drafters.training.start import spread_taps, start_weights
from hf_dcut.drafters.training.tap_cache import TapCache
from hf_dcut.drafters.training.teacher import check_head
from hf_dcut.drafters.training.trainer import STATE, Trainer, open_accelerator
from hf_dcut.regeneration import AnswerFile, Prompt
from hf_dcut.taps import tap_reader
from hf_dcut.target import tapped_layers
from hf_dcut.train_plan import TrainPlan

__all__ = ["TrainPlan", "train"]

logger = logging.getLogger(__name__)

# Share of a time budget that answers may take, and what is kept back for evaluating and saving.
_ANSWERS_SHARE, _RESERVE_SHARE = 0.4, 0.05


def train(plan: TrainPlan) -> dict[str, Any]:
    """Returns what the drafter in `plan.out` came to: steps, seconds, tokens a step on the held-out answers.

    Raises:
        FileNotFoundError: no such target, prompts or answers; nothing to resume.
        ValueError: a bad line of the prompts, a target whose layers cannot be read, a run that is already there.
        OSError: no room for the taps, with the numbers.
    """
    return _Run(plan).run()


class _Run:
    """One call of `train`, in one of its processes."""

    def __init__(self, plan: TrainPlan):
        self.plan, self.begin = plan, time.monotonic()
        self.work = plan.work or plan.out / "work"
        # Bad files are found before a large model is loaded.
        self.given = [answer for path in plan.answers for answer in read_answers(path)]
        self.prompts = [] if plan.prompts is None else read_prompts(plan.prompts)
        if not plan.resume and (self.work / STATE).exists():
            raise ValueError(f"{self.work} holds a run already: go on with resume=True, or give another folder")
        self.accelerator = open_accelerator()
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(plan.target)
        model = AutoModelForCausalLM.from_pretrained(plan.target, dtype=plan.dtype)
        self.model: PreTrainedModel = model.eval().requires_grad_(False).to(self.accelerator.device)
        config = model.config.get_text_config(decoder=True)
        self.taps = plan.taps or spread_taps(config.num_hidden_layers)
        self.layers = tapped_layers(self.model, self.taps)
        if plan.recipe.soft:
            check_head(self.model)

    def run(self) -> dict[str, Any]:
        answers, held_out = self._split(self._answers())
        model = self._start(answers)
        taps = self._cache([*answers, *held_out])
        recipe = self.plan.recipe
        trainer = Trainer(model, self.model, answers, held_out, taps, recipe, self.work, self.accelerator)
        if self.plan.resume and (self.work / STATE).exists():
            trainer.resume()
        trainer.run(self._seconds_left())
        result: dict[str, Any] = {"steps": trainer.step, "seconds": time.monotonic() - self.begin}
        if self.accelerator.is_main_process:
            result |= self._finish(model, trainer, answers, held_out)
        self.accelerator.wait_for_everyone()
        return result

    def _answers(self) -> list[Answer]:
        """Returns all answers, those that were given first, the same in every process."""
        known = self.given + self._regenerate(self._open_prompts()) if self.prompts else self.given
        if not self.plan.keep_loops:
            known = [without_loop(answer) for answer in known]
        known = [answer for answer in known if len(answer.anchors)]
        if not known:
            raise ValueError("no answer has two tokens or more: there is nothing to train on")
        return known

    def _open_prompts(self) -> list[Prompt]:
        """Returns the prompts whose answers were not given, without those that are too long."""
        answered = {a.ids[: a.prompt_tokens] for a in self.given}
        encoded = encode_each(self.tokenizer, self.prompts)
        short = [p for p in encoded if len(p) <= self.plan.max_prompt_tokens]
        if len(short) < len(encoded):
            logger.warning(
                "%d of %d prompts have more than max_prompt_tokens=%d tokens and are left out",
                *(len(encoded) - len(short), len(encoded), self.plan.max_prompt_tokens),
            )
        return [p for p in short if p not in answered]

    def _regenerate(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """Returns the target's answers, each process making its share, until a part of the time budget is over."""
        ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        own, plan = AnswerFile(self.work / f"answers-{rank}.jsonl"), self.plan
        limit = None if self.plan.time_budget is None else self.plan.time_budget * _ANSWERS_SHARE
        share = prompts[rank::ranks]
        with self._bar(len(share), "answers", "answer") as bar:
            bar.update(len(own.in_order(share)))
            if not self._late(limit):
                for _ in own.complete(self.model, share, plan.max_new_tokens, plan.slots, plan.keep_loops):
                    bar.update()
                    if self._late(limit):
                        break
        self.accelerator.wait_for_everyone()
        files = [AnswerFile(self.work / f"answers-{r}.jsonl") for r in range(ranks)]
        return [answer for r, file in enumerate(files) for answer in file.in_order(prompts[r::ranks])]

    def _late(self, limit: float | None) -> bool:
        return limit is not None and time.monotonic() - self.begin > limit

    def _split(self, answers: list[Answer]) -> tuple[list[Answer], list[Answer]]:
        """Returns answers to learn from and those that are held out: every so-many-th, wherever there are enough."""
        every = round(1 / self.plan.held_out) if self.plan.held_out else 0
        held_out = answers[every - 1 :: every] if every else []
        return [a for i, a in enumerate(answers) if not every or (i + 1) % every], held_out

    def _start(self, answers: Sequence[Answer]) -> DFlashModel:
        """Returns the weights to begin with; the taps become those of a drafter that is started from."""
        plan, size = self.plan, self.plan.draft_vocab_size
        vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
        model = start_weights(
            plan.start,
            self.model,
            list(self.layers),
            taps=self.taps,
            mask_token_id=self._mask_token(answers) if plan.fresh else 0,
            block_size=plan.block_size,
            depth=plan.layers or 5,
            draft_ids=None if size is None else frequent_tokens(answers, size, vocabulary),
            seed=plan.recipe.seed,
            dtype=torch.promote_types(self.model.dtype, torch.float32),
        )
        self.taps = model.config.target_layer_ids
        return model

    def _mask_token(self, answers: Sequence[Answer]) -> int:
        """Returns the mask token that was asked for, or a special token that stands nowhere in the answers."""
        if self.plan.mask_token_id is not None:
            return self.plan.mask_token_id
        used = {token for answer in answers for token in answer.ids}
        free = [token for token in sorted(self.tokenizer.all_special_ids) if token not in used]
        if not free:
            raise ValueError(
                "mask_token_id=None: every special token of the tokenizer stands in the answers. Name a token that "
                "text never holds"
            )
        return free[-1]

    def _cache(self, answers: Sequence[Answer]) -> Callable[[Answer], Tensor]:
        """Returns a function from answers to their taps, after each process has added those of its share."""
        ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        share, cache = answers[rank::ranks], self._tap_cache(rank)
        with (
            self._bar(len(cache.missing(share)), "taps", "answer") as bar,
            tap_reader(self.model, self.taps, final=self._final) as read,
        ):
            for added in cache.fill(share, read):
                bar.update(added)
        self.accelerator.wait_for_everyone()
        readers = [self._tap_cache(r).open() for r in range(ranks)]
        places = {answer: index % ranks for index, answer in enumerate(answers)}
        return lambda answer: readers[places[answer]](answer)

    def _tap_cache(self, rank: int) -> TapCache:
        """Returns the taps that a process has made."""
        width = self.model.config.get_text_config(decoder=True).hidden_size * (len(self.taps) + self._final)
        source = {"target": self.plan.target, "taps": list(self.taps), "final": self._final}
        return TapCache(self.work / "taps" / str(rank), width, self.model.dtype, source)

    @property
    def _final(self) -> bool:
        """Whether what the target's head reads is kept behind the taps."""
        return self.plan.recipe.soft > 0

    def _seconds_left(self) -> float | None:
        """Returns what is left of the time budget for training."""
        if self.plan.time_budget is None:
            return None
        left = self.plan.time_budget * (1 - _RESERVE_SHARE) - (time.monotonic() - self.begin)
        if left <= 0:
            raise ValueError(
                f"time_budget={self.plan.time_budget:g} s: answers and taps took all of it. They are kept in "
                f"{self.work}; give more time and resume=True"
            )
        return left

    def _finish(
        self, model: DFlashModel, trainer: Trainer, answers: Sequence[Answer], held_out: Sequence[Answer]
    ) -> dict[str, Any]:
        """Writes the drafter in bfloat16 with its card, and returns what it does on the held-out answers."""
        if held_out:
            multiplier = model.config.output_multiplier * trainer.fit_multiplier()
            model.config = replace(model.config, output_multiplier=multiplier)
        dtype = torch.bfloat16 if self.plan.recipe.precision == "bf16" else model.fc.weight.dtype
        model.eval().requires_grad_(False).to(dtype).save_pretrained(self.plan.out)
        steps = None
        if held_out:
            drafter = AutoDrafter.from_pretrained(self.plan.out, device=self.accelerator.device)
            steps = replay(drafter, self.model, held_out, self.plan.slots)
        facts = Facts(
            target=self.plan.target,
            prompts=self.plan.prompts,
            start=self.plan.start,
            command=self.plan.command,
            answers=len(answers),
            answer_tokens=sum(len(a) - a.prompt_tokens for a in answers),
            held_out=len(held_out),
            steps=trainer.step,
            seconds=trainer.spent,
            tokens_per_step=steps.tokens_per_step if steps else None,
            place_acceptance=steps.place_acceptance if steps else (),
        )
        (self.plan.out / "README.md").write_text(card(model.config, self.plan.recipe, facts), encoding="utf-8")
        return {"tokens_per_step": facts.tokens_per_step, "place_acceptance": list(facts.place_acceptance)}

    def _bar(self, total: int, what: str, unit: str) -> Any:
        off = None if self.accelerator.is_main_process else True
        return tqdm(total=total, desc=what, unit=unit, disable=off)
