"""`hf-dcut bench`: loads, says how long it will take, measures cell after cell, prints a table each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_dcut import __version__
from hf_dcut.assembly import open_engine, warmup
from hf_dcut.bench.cell import Cell, Key
from hf_dcut.bench.drafter import make_drafter
from hf_dcut.bench.journal import Journal
from hf_dcut.bench.machine import commit, machine
from hf_dcut.bench.methods import SHORT, TREE, Setting, applies, drafts_of, requests_of, shorter
from hf_dcut.bench.plan import Plan
from hf_dcut.bench.prompts import encode_each, read_prompts
from hf_dcut.bench.rounds import CALLS, STEPS, blocks_of, rounds_of, run_rounds, warm_up
from hf_dcut.bench.table import cell_table
from hf_dcut.bench.trace import record
from hf_dcut.config import DCutConfig
from hf_dcut.cost_table import CostTable
from hf_dcut.drafters.base import Drafter
from hf_dcut.profiling import kv_length_for, powers_of_two
from hf_dcut.stats import Stats
from hf_dcut.wording import counted

# Steps from which the run's duration is estimated.
_PROBE_TOKENS = 6


def bench(plan: Plan) -> list[Cell]:
    """Returns the cells of a run after printing their tables; a run whose file exists goes on where it stopped.

    Raises:
        ValueError: an unknown data set, method or model, prompts that do not fit, or a file of another run.
    """
    return _Run(plan).measure()


class _Run:
    """A run: the models, the prompts of each data set, the journal."""

    def __init__(self, plan: Plan):
        self.plan = plan
        texts = {name: read_prompts(name) for name in plan.data}
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(plan.target)
        self.model = load(plan.target, plan.dtype)
        self.assistant = load(plan.assistant, plan.dtype) if plan.assistant else None
        most = max(plan.record, *(plan.count(batch) for batch in plan.batch_sizes))
        self.prompts: dict[str, list[list[int]]] = {}
        self.questions: dict[str, list[str]] = {}
        skipped, longest = {}, self._longest_prompt()
        for name, asked in texts.items():
            pairs = zip(asked, encode_each(self.tokenizer, asked), strict=True)
            short = [(text, list(ids)) for text, ids in pairs if len(ids) <= longest]
            skipped[name] = len(asked) - len(short)
            if not short:
                raise ValueError(f"data={name!r}: all {len(asked)} prompts have more than {longest} tokens")
            taken = [short[i % len(short)] for i in range(most)]
            self.questions[name], self.prompts[name] = [text for text, _ in taken], [ids for _, ids in taken]
        header = {"plan": plan.to_dict(), "machine": machine(), "skipped_prompts": skipped}
        self.journal = Journal.open(plan.out, {**header, "version": __version__, "commit": commit()})
        self.drafters: dict[str, Drafter] = {}
        print(
            "".join(f"{counted(n, 'prompt')} of {name} left out as too long\n" for name, n in skipped.items() if n),
            end="",
        )

    def measure(self) -> list[Cell]:
        """Returns the cells."""
        keys = self.plan.cells(self.drafter(self.plan.data[0]).draft_tokens)
        self._announce([key for key in keys if self._missing(key)])
        if self.plan.record:
            for name, tree in product(self.plan.data, (False, True) if self._trees else (False,)):
                self._record(name, tree)
        for key in keys:
            self._measure(key)
            cell = self.journal.cell(key)
            size = f"{counted(self.plan.count(key.batch), 'prompt')}, {counted(len(cell.rounds), 'round')}"
            print(f"\n{key}: {size}, drafter {self.plan.drafter}")
            print(cell_table(cell), flush=True)
            print("".join(f"ALARM {text}\n" for text in cell.alarms()), end="")
        return [self.journal.cell(key) for key in keys]

    def drafter(self, data: str) -> Drafter:
        """Returns the drafter; an oracle knows the answers of one data set."""
        if data not in self.drafters:
            prompts, tokens = self.prompts[data], self.plan.max_new_tokens
            self.drafters[data] = make_drafter(self.plan.drafter, self.model, prompts, tokens)
        return self.drafters[data]

    def _measure(self, key: Key) -> None:
        """Runs the rounds that a cell still lacks."""
        missing = self._missing(key)
        if not missing:
            return
        prompts = self.prompts[key.data][: self.plan.count(key.batch)]
        setting = self._setting(key, prompts)
        methods = [method for method in self.plan.methods if applies(method, setting)]
        if not methods:
            raise ValueError(f"methods={self.plan.methods}: none of them runs in the cell {key}")
        peaks = warm_up(setting, prompts, methods)
        done = {entry["round"] for entry in self.journal.cell(key).rounds}
        turns = self.plan.turns or (STEPS if self.model.device.type == "cpu" else CALLS)
        with tqdm(total=missing * len(methods), desc=str(key), unit="run", disable=None) as bar:
            size = self.plan.rounds, self.plan.per_slot
            rounds = run_rounds(setting, prompts, methods, *size, done, lambda method: bar.update(), turns)
            for number, entry in enumerate(rounds):
                answers = entry.pop("answers")
                for method, values in entry["methods"].items():
                    values["peak_bytes"] = values["peak_bytes"] or peaks[method]
                self.journal.write({"kind": "round", "cell": key.to_dict(), **entry})
                if not number:
                    self._show(key.data, answers)

    def _setting(self, key: Key, prompts: Sequence[list[int]]) -> Setting:
        """Returns what the methods of a cell share."""
        drafter, width = self.drafter(key.data), max(map(len, prompts))
        costs = self._costs(drafter, key)
        trees = self._costs(drafter, key, True) if self._trees else None
        short = None
        if key.draft_tokens < drafter.draft_tokens and any(m.startswith(SHORT) for m in self.plan.methods):
            less = shorter(drafter, key.draft_tokens)
            short = (less, self._costs(less, key))
        return Setting(
            self.model,
            drafter,
            key.batch,
            self.plan.max_new_tokens,
            width,
            key.temperature,
            key.draft_tokens,
            costs,
            trees,
            short,
            self.assistant,
        )

    def _costs(self, drafter: Drafter, key: Key, tree: bool = False) -> CostTable:
        """Returns step costs of all the run's batch sizes, measured together: a machine's speed drifts.

        Those of the run's own drafter go into the journal.
        """
        config = DCutConfig(**drafts_of(drafter, tree, key.draft_tokens))
        sizes = powers_of_two(max(self.plan.batch_sizes))
        costs = warmup(self.model, drafter, sizes, config, self._longest(key.data))
        if drafter is self.drafter(key.data) and not self.journal.has_costs(key, tree):
            seconds = costs.seconds[kv_length_for(self._longest(key.data))]
            line = {"kind": "costs", "cell": key.to_dict(), "draft_tokens": key.draft_tokens}
            kind = {"tree": True, "nodes": costs.draft_tokens} if tree else {}
            self.journal.write({**line, **kind, "seconds": {str(b): dict(row) for b, row in seconds.items()}})
        return costs

    @property
    def _trees(self) -> bool:
        """Whether a method drafts trees."""
        return any(method.startswith(TREE) for method in self.plan.methods)

    def _longest(self, data: str) -> int:
        """Returns the tokens of the longest request of a data set."""
        return max(map(len, self.prompts[data])) + self.plan.max_new_tokens

    def _record(self, data: str, tree: bool) -> None:
        """Records the drafts of a data set's first prompts, chains or trees, unless the journal has them."""
        if data in self.journal.recorded(tree):
            return
        prompts = self.prompts[data][: self.plan.record]
        batch = min(max(self.plan.batch_sizes), len(prompts))
        setting = Setting(self.model, self.drafter(data), batch, self.plan.max_new_tokens, max(map(len, prompts)))
        with tqdm(total=len(prompts), desc=f"recording {data}", unit="request", disable=None) as bar:
            requests = requests_of(setting, prompts)
            traces = record(self.model, setting.drafter, requests, batch, progress=bar.update, tree=tree)
        kind = {"tree": True} if tree else {}
        line = {"kind": "traces", "data": data, **kind, "requests": [trace.to_dict() for trace in traces]}
        self.journal.write(line)

    def _missing(self, key: Key) -> int:
        """Returns how many rounds of a cell are not there yet."""
        blocks = len(blocks_of(self.plan.count(key.batch), key.batch, self.plan.per_slot))
        return rounds_of(blocks, self.plan.rounds) - len(self.journal.cell(key).rounds)

    def _announce(self, keys: Sequence[Key]) -> None:
        """Says how long the missing rounds will take, as if every method were as fast as plain decoding."""
        speed = {batch: self._probe(batch) for batch in {key.batch for key in keys}}
        seconds = 0.0
        for key in keys:
            step, reading = speed[key.batch]
            count = self.plan.count(key.batch)
            prompts = self.prompts[key.data][:count]
            once = sum(map(len, prompts)) * reading + count * self.plan.max_new_tokens / key.batch * step
            blocks = len(blocks_of(count, key.batch, self.plan.per_slot))
            seconds += once * self._missing(key) / blocks * len(self.plan.methods)
        if keys:
            size = f"{counted(len(keys), 'cell')}, {counted(len(self.plan.methods), 'method')}"
            print(
                f"{size}: about {counted(max(1, round(seconds / 60)), 'minute')} if "
                "every method were as fast as plain decoding; measuring step costs and warming up come on top",
                flush=True,
            )

    def _probe(self, batch: int) -> tuple[float, float]:
        """Returns seconds of a plain step of B requests and of a prompt token."""
        prompts = self.prompts[self.plan.data[0]][:batch]
        setting = Setting(self.model, self.drafter(self.plan.data[0]), batch, _PROBE_TOKENS, max(map(len, prompts)))
        requests = requests_of(setting, prompts)
        for request in requests:
            request.eos = frozenset()
        config, longest = DCutConfig(budget="none"), setting.width + _PROBE_TOKENS
        with open_engine(self.model, None, config, len(prompts), setting.width, longest, Stats(records=[])) as engine:
            begin = time.perf_counter()
            list(engine.run(requests))
            whole, steps = time.perf_counter() - begin, engine.stats.records or []
        plain = [step.seconds["total"] for step in steps if step.total == len(step.requests)]
        return statistics.median(plain), (whole - sum(plain)) / sum(map(len, prompts))

    def _longest_prompt(self) -> int:
        """Returns how many tokens a prompt may have."""
        limit = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        longest = (limit or 1 << 30) - self.plan.max_new_tokens
        return min(longest, self.plan.max_prompt_tokens or longest)

    def _show(self, data: str, answers: Sequence[list[int]]) -> None:
        """Prints some prompts with the answers of the last method."""
        for question, tokens in list(zip(self.questions[data], answers, strict=False))[: self.plan.show]:
            print(f"\n> {question.splitlines()[0]}\n{self.tokenizer.decode(tokens, skip_special_tokens=True).strip()}")


def load(name: str, dtype: str) -> PreTrainedModel:
    """Returns a model that decodes without what its generation config brings along but the special tokens.

    Penalties and warpers would change answers, and not all methods of upstream know them.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval().to(device)
    own = model.generation_config
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    kept: dict[str, Any] = {name: getattr(own, name) for name in names}
    if kept["pad_token_id"] is None:
        kept["pad_token_id"] = 0
    model.generation_config = GenerationConfig(**kept)
    return model
