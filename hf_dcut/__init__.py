"""hf_dcut: batched speculative decoding for Hugging Face Transformers that never changes a token.

    import hf_dcut
    drafter = hf_dcut.AutoDrafter.from_pretrained(folder_or_hub_id)
    model.generate(**inputs, assistant_model=drafter, dcut=True, do_sample=False)

A step runs through these stages, one file each, in the order that `engine.py` alone knows:

    drafters/      propose: the last committed token of every request -> Drafts
    scores.py      how likely each draft is to survive -> Scores
    budget.py      which of them are worth verifying -> Cut
    packing.py     these in one row, without padding -> Packed
    target.py      the target's logits for that row
    choosing.py    its tokens: processors, then the likeliest or a draw -> Choice
    acceptance.py  how far the drafts agree with them -> Verdict
    commit.py      the requests go on -> Committed
"""

from hf_dcut.assembly import warmup
from hf_dcut.batch_records import BatchRequest, BatchResult
from hf_dcut.batching import BatchError, BatchInterrupted, BatchRun, generate_batch, iterate_batch
from hf_dcut.config import DCutConfig
from hf_dcut.cost_table import CostTable
from hf_dcut.drafters import AutoDrafter
from hf_dcut.drafters.base import Drafter
from hf_dcut.drafters.best_of import BestOf
from hf_dcut.drafters.oracle import OracleDrafter
from hf_dcut.drafters.prompt_lookup import PromptLookupDrafter
from hf_dcut.drafters.suffix import SuffixDrafter
from hf_dcut.generation import disable, enable, generate
from hf_dcut.manager import BatchManager, QueueFull
from hf_dcut.padded import DCutOutput
from hf_dcut.processors import PerRequest
from hf_dcut.stats import Stats, StepRecord
from hf_dcut.streaming import BatchStreamer, Piece

__version__ = "0.1.0"

__all__ = [
    "AutoDrafter",
    "BatchError",
    "BatchInterrupted",
    "BatchManager",
    "BatchRequest",
    "BatchResult",
    "BatchRun",
    "BatchStreamer",
    "BestOf",
    "CostTable",
    "DCutConfig",
    "DCutOutput",
    "Drafter",
    "OracleDrafter",
    "PerRequest",
    "Piece",
    "PromptLookupDrafter",
    "QueueFull",
    "Stats",
    "StepRecord",
    "SuffixDrafter",
    "disable",
    "enable",
    "generate",
    "generate_batch",
    "iterate_batch",
    "warmup",
]

enable()
