"""The table of targets: every case and every refusal, and docs/targets.md made from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dense_targets import DENSE
from expert_targets import EXPERT
from recurrent_targets import RECURRENT
from refused_targets import REFUSED
from target_cases import Case

PAGE = Path(__file__).resolve().parents[2] / "docs" / "targets.md"

GROUPS: dict[str, list[Case]] = {"Dense": DENSE, "Mixtures of experts": EXPERT, "With recurrent layers": RECURRENT}
CASES = [case for group in GROUPS.values() for case in group]


def page() -> str:
    """Returns docs/targets.md."""
    parts = [_HEADER]
    for title, cases in GROUPS.items():
        parts += [f"## {title}", "", *_rows(cases), ""]
    parts += ["## Refused by name", "", "| Architecture | `model_type` | Such as | Why |", "|---|---|---|---|"]
    parts += [f"| {r.name} | `{r.config.model_type}` | {r.models or '–'} | {r.reason} |" for r in REFUSED]
    return "\n".join(parts) + "\n"


_HEADER = """# Targets

Which architectures of Transformers can be a target. `make test-targets` runs every row and writes this page.

- *lossless*: greedy text equals the model's own plain `generate`, token for token, with 1, 3 and 8 requests, a random
  DFlash drafter and one that knows the answer, and every logit to 1e-6 (1e-4 with recurrent layers, which keep float32
  inside). In float64, or in float32 where it says so.
- *cut*: so with the budget chosen from costs (auto) and with fixed ones.
- *sampled*: text drawn with drafts equals what is drawn without, seed by seed.
- *tensor parallel*: two processes say what one does ([several GPUs](parallel.md)).

The models are tiny and random. They have the architecture's layers, and where it has a window, one shorter than the
text; the models named beside it were not run. What is in no row is tried out when it is first used: ragged rows are run
packed and through the stock forward, and a model that gives other logits, or cannot run them, is refused by name.
With images: [guides/images.md](guides/images.md). Adapters, quantised weights: [guides/weights.md](guides/weights.md).
"""


def _rows(cases: list[Case]) -> Iterator[str]:
    yield "| Architecture | `model_type` | Such as | Special | Lossless | Cut | Sampled | Tensor parallel |"
    yield "|---|---|---|---|---|---|---|---|"
    for case in cases:
        exact = str(case.dtype).removeprefix("torch.")
        special = "; ".join(filter(None, (case.has, "" if case.taps else "no DFlash drafter, prompt lookup only")))
        cells = [case.name, f"`{case.config.model_type}`", case.models or "–", special or "–"]
        yield f"| {' | '.join([*cells, exact, 'auto, fixed', case.sampled, case.tensor_parallel])} |"
