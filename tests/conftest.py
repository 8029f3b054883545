"""What the tests share: tiny random targets, the prepared SmolLM2, and a watch on Transformers' deprecations.

The environment is set before Transformers and Triton are imported: nothing is downloaded, nothing outside the
repository is read or written (cost tables go to a folder of this run), and without a GPU Triton interprets kernels.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import string
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

_HOME = tempfile.TemporaryDirectory(prefix="hf-dcut-tests-")
os.environ["HF_HOME"] = _HOME.name
os.environ["HF_HUB_OFFLINE"] = "1"
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers  # noqa: E402 (see above)
from transformers import (  # noqa: E402 (see above)
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from hf_dcut import skipping  # noqa: E402
from hf_dcut.drafters.base import BoundDrafter, Drafter  # noqa: E402
from hf_dcut.drafters.oracle import BoundOracle, OracleDrafter  # noqa: E402
from hf_dcut.types import Batch, Committed, Drafts  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
SMOLLM2 = ROOT / "models" / "smollm2-135m-instruct"
CONFIGS = {
    "llama": LlamaConfig,
    "qwen3": Qwen3Config,
    "qwen3_5": Qwen3_5TextConfig,
    "qwen3_5_moe": Qwen3_5MoeTextConfig,
    "qwen3_next": Qwen3NextConfig,
}

# Weights this large, and a head of its own, keep greedy text from settling into a loop: 48 tokens hold 19 or more
# different ones for either kind. With Transformers' 0.02 and a tied head it is one token, over and over.
TINY = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Every other layer is a Gated DeltaNet; of four experts two are asked.
HYBRID = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 16,
    "experts_implementation": "eager",
}
HYBRIDS = {
    "qwen3_5": {k: v for k, v in HYBRID.items() if "expert" not in k and "moe" not in k},
    "qwen3_5_moe": HYBRID,
    "qwen3_next": HYBRID,
}

# Knows three roles and whether to think.
TEMPLATE = """
{%- for message in messages -%}
{%- if message.role not in ["system", "user", "assistant"] -%}{{ raise_exception("no such role") }}{%- endif -%}
{{ message.role }}: {{ message.content }}
{% endfor -%}
{%- if add_generation_prompt -%}assistant: {% endif -%}
{%- if enable_thinking -%}<think>{%- endif -%}
"""

Builder = Callable[..., PreTrainedModel]


def build_target(kind: str, dtype: torch.dtype = torch.float64, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Returns a random model of three small layers, the same for the same arguments.

    Args:
        kind: a key of CONFIGS.
        dtype: float64 by default, where packed and padded rows agree to the last few bits.
        seed: of the weights; torch's global generator is left alone.
        overrides: config fields, such as `eos_token_id=None` for text of any length.
    """
    config = CONFIGS[kind](**(TINY | HYBRIDS.get(kind, {}) | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    # Random decays forget within a token or two; these make some heads of a recurrent layer remember.
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data = torch.linspace(-5, 0, len(parameter), dtype=dtype)
    return model


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with a token for each of 98 characters, for the ids of the tiny targets."""
    words = ["<pad>", "<bos>", "<eos>", *string.digits, *string.ascii_letters, *string.punctuation, " ", "\n", "é", "ü"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "?"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE.strip(), **special)


def build_prompts(rows: int, seed: int = 0, longest: int = 12) -> dict[str, torch.Tensor]:
    """Returns input_ids and attention_mask, int64 [rows, width]: random tokens, a random length for each row."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (rows, 1), generator=generator)
    width = int(lengths.max())
    mask = (torch.arange(width) >= width - lengths).long()
    tokens = torch.randint(3, TINY["vocab_size"], (rows, width), generator=generator)
    return {"input_ids": torch.where(mask.bool(), tokens, TINY["pad_token_id"]), "attention_mask": mask}


@pytest.fixture(scope="session")
def make_target() -> Builder:
    """`make_target(kind, dtype=torch.float64, seed=0, **overrides)`, a new model at every call."""
    return build_target


@pytest.fixture(scope="session")
def tiny_llama() -> Builder:
    """`tiny_llama(dtype=torch.float64, seed=0, **overrides)`."""
    return lambda dtype=torch.float64, seed=0, **overrides: build_target("llama", dtype, seed, **overrides)


@pytest.fixture(scope="session")
def tiny_qwen3() -> Builder:
    """`tiny_qwen3(dtype=torch.float64, seed=0, **overrides)`."""
    return lambda dtype=torch.float64, seed=0, **overrides: build_target("qwen3", dtype, seed, **overrides)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama in float64, whose tokens are characters."""
    folder = tmp_path_factory.mktemp("tiny")
    build_target("llama").save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_prompts() -> Callable[..., dict[str, torch.Tensor]]:
    """`make_prompts(rows, seed=0, longest=12)`, for `generate(**prompts)`: left-padded, 1 to `longest` tokens a row."""
    return build_prompts


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """A tiny Llama whose texts end in 40 or 77: early, late, or never. Modules may have their own `model`."""
    return build_target("llama", eos_token_id=[40, 77])


@pytest.fixture(scope="module")
def inputs() -> dict[str, torch.Tensor]:
    """Five prompts of different length, for `generate(**inputs)`. Modules may have their own `inputs`."""
    return build_prompts(5, seed=4)


class StubDrafter(Drafter, BoundDrafter):
    """Drafts what a function says, and remembers nothing."""

    def __init__(
        self,
        draft_tokens: int,
        propose: Callable[[Batch], Drafts] | None = None,
        logits: Callable[[Batch], torch.Tensor] | None = None,
        taps: tuple[int, ...] = (),
    ):
        self.draft_tokens, self.taps, self.independent = draft_tokens, taps, logits is not None
        self._propose, self._logits = propose, logits

    def check(self, target: PreTrainedModel) -> None: ...

    def bind(self, target: PreTrainedModel, slots: int, length: int) -> BoundDrafter:
        return self

    def cell_bytes(self, target: PreTrainedModel) -> int:
        return 0

    def fingerprint(self) -> dict[str, object]:
        return {"kind": "stub"}

    def observe(self, committed: Committed) -> None: ...

    def propose(self, batch: Batch) -> Drafts:
        assert self._propose is not None, "this stub is drawn from"
        return self._propose(batch)

    def propose_logits(self, batch: Batch) -> tuple[torch.Tensor, None]:
        assert self._logits is not None, "this stub is not drawn from"
        return self._logits(batch), None

    def move(self, source: int, destination: int) -> None: ...

    def copy(self, source: int, destination: int, length: int) -> None: ...

    def free(self, slot: int) -> None: ...


@pytest.fixture(scope="session")
def stub_drafter() -> Callable[..., StubDrafter]:
    """`stub_drafter(D, propose=None, logits=None, taps=())`: functions of a `Batch` that give `Drafts` or logits."""
    return StubDrafter


@pytest.fixture(scope="session")
def knowing() -> Callable[..., Any]:
    """`knowing(inputs, sequences, draft_tokens=6, profile=(0.3, 0.9, 1.0))`: an oracle of what these prompts got.

    The profile is mixed, so that some drafts are cut, some rejected and whole blocks accepted.
    """

    def build(
        inputs: dict[str, torch.Tensor],
        sequences: torch.Tensor,
        draft_tokens: int = 6,
        profile: tuple[float, ...] = (0.3, 0.9, 1.0),
    ) -> OracleDrafter:
        return OracleDrafter(known_texts(inputs, sequences), draft_tokens, profile)

    return build


def known_texts(inputs: dict[str, torch.Tensor], sequences: torch.Tensor) -> dict[tuple[int, ...], list[int]]:
    """Returns what was said to each prompt, by its tokens."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
    rows = zip(ids, mask, sequences[:, ids.shape[1] :].tolist(), strict=True)
    return {tuple(row[own].tolist()): said for row, own, said in rows}


class SideOracle(OracleDrafter):
    """Knows what the target says, and in trees puts it behind wrong siblings, so that no accepted path is contiguous.

    Of a chain a, b, c it makes, with x and y wrong:  anchor ── x ── b       nodes 0, 2
                                                            └─ a ── b ── c   nodes 1, 3, 5; node 4 is y beside b
    """

    branches = True

    def bind(self, target: PreTrainedModel, slots: int, length: int) -> BoundOracle:
        weight = target.get_input_embeddings().weight
        return BoundSide(self, slots, length, weight.shape[0], weight.device)


class BoundSide(BoundOracle):
    def propose_tree(self, batch: Batch, nodes: int) -> Drafts:
        chain = self.propose(batch)
        a, b, c = chain.token[:, :3].unbind(1)
        sure = chain.confidence[:, 0]
        token = torch.stack([(a + 1) % self.vocabulary, a, b, b, (b + 1) % self.vocabulary, c], 1)
        parent = torch.tensor([-1, -1, 0, 1, 1, 3]).expand_as(token)
        same = torch.ones_like(sure)
        confidence = torch.stack([sure, same, sure, same, same, sure], 1)
        count = torch.tensor([0, 2, 5, 6])[chain.count.clamp_max(3)]
        return Drafts(token, count, confidence, parent).first(self.oracle.draft_tokens)


@pytest.fixture(scope="session")
def knowing_aside() -> Callable[..., SideOracle]:
    """`knowing_aside(inputs, sequences, draft_tokens=6, profile=(0.4, 0.9, 1.0))`: the same, with trees."""

    def build(
        inputs: dict[str, torch.Tensor],
        sequences: torch.Tensor,
        draft_tokens: int = 6,
        profile: tuple[float, ...] = (0.4, 0.9, 1.0),
    ) -> SideOracle:
        return SideOracle(known_texts(inputs, sequences), draft_tokens, profile)

    return build


def chance(counts: torch.Tensor, law: torch.Tensor) -> float:
    """Returns how probable it is that draws from the law fit it worse than these counts do (Pearson's chi-square).

    Outcomes that are expected less than five times are one outcome, for which the approximation holds again.

    Args:
        counts: int64 [n], how often each outcome came.
        law: float64 [n], their probabilities.
    """
    expected, seen = law.double() * counts.sum(), counts.double()
    assert not seen[law == 0].any(), "an outcome of no probability"
    rare = expected < 5
    expected, seen = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (expected, seen))
    if expected[-1] < 5:
        expected, seen = (torch.cat([x[:-2], x[-2:].sum()[None]]) for x in (expected, seen))
    if len(expected) == 1:
        return 1.0  # too few draws to tell any two outcomes apart
    statistic = ((seen - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2))


@pytest.fixture(scope="session", name="chance")
def chance_fixture() -> Callable[[torch.Tensor, torch.Tensor], float]:
    """`chance(counts, law)`: how probable worse counts are under the law."""
    return chance


@pytest.fixture
def fresh_seed() -> int:
    """A seed nobody has chosen, printed, for tests of distributions: they state how often they fail by chance."""
    seed = secrets.randbits(62)
    print(f"fresh seed {seed}")  # noqa: T201 (pytest shows it when the test fails)
    return seed


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the prepared SmolLM2-135M-Instruct."""
    if not (SMOLLM2 / "config.json").is_file():
        pytest.fail(f"{SMOLLM2} is missing: run `make setup`", pytrace=False)
    return SMOLLM2


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fills what torch.empty and its like return with NaN, or the largest integer: reads of unwritten elements show."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture(autouse=True)
def steady_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets no test depend on what else the machine does: measured costs are kept however much they vary."""
    monkeypatch.setattr("hf_dcut.timing.STEADY", math.inf)


@pytest.fixture(autouse=True)
def forgotten_calls() -> None:
    """Lets no test begin with what drafting gained in another."""
    skipping.forget()


class _Deprecations(logging.Handler):
    """Keeps Transformers' log lines that announce a removal; the warnings filter does not see those."""

    WORDS = ("deprecated", "will be removed")

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if any(word in line.lower() for word in self.WORDS):
            self.lines.append(line)


@pytest.fixture(autouse=True)
def no_deprecated_calls() -> Iterator[None]:
    """Fails a test in which Transformers logs that something used will go away."""
    handler, logger = _Deprecations(), logging.getLogger("transformers")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    assert not handler.lines


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--grid", action="store_true", help="every combination of each target, and docs/targets.md anew")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_unconfigure() -> None:
    _HOME.cleanup()
