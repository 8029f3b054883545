"""What the parts of the check share: the device, the sizes, and a large model that is built when first asked for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from transformers import PreTrainedModel

from hf_dcut.assembly import open_engine
from hf_dcut.bench.drafter import ORACLE_PROFILE
from hf_dcut.bench.gpu import shapes
from hf_dcut.bench.gpu.ceilings import Ceilings, measure_ceilings
from hf_dcut.bench.gpu.chain import ChainOracle
from hf_dcut.budget import positions
from hf_dcut.config import PAPER_RATIOS, DCutConfig
from hf_dcut.cost_table import CostTable
from hf_dcut.drafters.dflash import DFlashDrafter
from hf_dcut.drafters.wrapping import Wrapped
from hf_dcut.profiling import kv_length_for

# What stands where a draft is wanted. A chain's text may hold it, which does no harm: the drafter is untrained.
_MASK = 2


@dataclass(frozen=True)
class Sizes:
    """How much is done.

    Attributes:
        chain: shape of the large model, whose steps are timed.
        block, layers, taps: of its DFlash drafter.
        dtype: of both.
        batches: B of the cost table.
        longest: tokens of a request while costs are measured; half of them are in use.
        varied: shape of the model whose answers are compared with plain `generate`'s.
        rows, answer: requests and new tokens of that.
        graph_shape: of the model that graphs are compared on.
        graph_steps: steps of that.
        speed_batches, prompt, new_tokens: of tokens per second.
        copied, side: bytes and rows by which the ceilings are measured.
        compile_seconds: what compiling a model may take.
    """

    chain: shapes.Shape
    block: int
    layers: int
    taps: tuple[int, ...]
    dtype: torch.dtype
    batches: tuple[int, ...]
    longest: int
    varied: shapes.Shape
    rows: int
    answer: int
    graph_shape: shapes.Shape
    graph_steps: int
    speed_batches: tuple[int, ...]
    prompt: int
    new_tokens: int
    copied: int
    side: int
    compile_seconds: float


FULL = Sizes(
    chain=shapes.QWEN3_8B,
    block=16,
    layers=5,
    taps=(1, 9, 17, 25, 33),
    dtype=torch.bfloat16,
    batches=(1, 8, 16, 32, 64),
    longest=2048,
    varied=shapes.SMOLLM2_135M,
    rows=16,
    answer=128,
    graph_shape={**shapes.SMALL, "hidden_size": 1024, "num_attention_heads": 8, "head_dim": 128},
    graph_steps=2000,
    speed_batches=(32, 64, 16, 8, 4),
    prompt=64,
    new_tokens=128,
    copied=1 << 32,
    side=8192,
    compile_seconds=45.0,
)
TINY = Sizes(
    chain=shapes.SMALL,
    block=4,
    layers=1,
    taps=(0, 1),
    dtype=torch.float32,
    batches=(1, 2),
    longest=64,
    varied=shapes.SMALL,
    rows=4,
    answer=12,
    graph_shape=shapes.SMALL,
    graph_steps=24,
    speed_batches=(2,),
    prompt=5,
    new_tokens=8,
    copied=1 << 16,
    side=32,
    compile_seconds=0.0,
)


def made_up_costs(rows: int, depth: int) -> CostTable:
    """Returns costs of which no budget is always the best one, so that "auto" takes several."""
    drafted = {positions(share, rows, depth): 1.0 + share for share in PAPER_RATIOS}
    return CostTable.from_rows({rows: {0: 1.0, **drafted}}, depth)


class Rig:
    """The device and what lies on it.

    Args:
        tiny: small sizes.

    Attributes:
        costs: what was measured so far.
        kv_length: cells in use meanwhile.
        graphed: by B, whether what was measured was replayed as CUDA graphs.
    """

    def __init__(self, tiny: bool):
        self.tiny, self.sizes = tiny, TINY if tiny else FULL
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.costs = CostTable(self.sizes.block - 1)
        self.graphed: dict[int, bool] = {}
        self.kv_length = kv_length_for(self.sizes.longest)

    @cached_property
    def model(self) -> PreTrainedModel:
        """The large target."""
        return shapes.chain_model(self.sizes.chain, self.device, self.sizes.dtype)

    @cached_property
    def drafter(self) -> DFlashDrafter:
        """Its untrained drafter: as slow as a trained one."""
        return self.random_drafter(self.model)

    def measured(self, rows: int) -> dict[int, float]:
        """Returns the row of the cost table for B requests, measured when first asked for: {T: seconds}."""
        if rows not in self.costs.seconds.get(self.kv_length, {}):
            config = DCutConfig(cost_table=self.costs, cuda_graph_batch_sizes=(rows,))
            sizes = (rows, 1, self.sizes.longest)
            with open_engine(self.model, self.drafter, config, *sizes, batch_sizes=[rows]) as engine:
                self.graphed[rows] = engine.replaying.graphs is not None
        return self.costs.seconds[self.kv_length][rows]

    @cached_property
    def ceilings(self) -> Ceilings:
        """What the device can do at most."""
        return measure_ceilings(self.device, self.sizes.dtype, self.sizes.copied, self.sizes.side)

    def oracle_drafter(
        self, model: PreTrainedModel, drafter: DFlashDrafter, longest: int
    ) -> tuple[Wrapped, ChainOracle]:
        """Returns a drafter with the drafts of an oracle behind it, and the oracle.

        Args:
            model: a chain model.
            drafter: of it, whose price every step pays.
            longest: tokens of the longest request.
        """
        vocabulary, depth = model.config.vocab_size, self.sizes.block - 1
        oracle = ChainOracle(vocabulary, depth, ORACLE_PROFILE, longest, self.device)
        return Wrapped(drafter, oracle), oracle

    def random_drafter(self, model: PreTrainedModel) -> DFlashDrafter:
        """Returns an untrained DFlash drafter of a model's widths and dtype."""
        return DFlashDrafter.random(
            model.config,
            taps=[tap for tap in self.sizes.taps if tap < model.config.num_hidden_layers - 1],
            mask_token_id=_MASK,
            block_size=self.sizes.block,
            layers=self.sizes.layers,
            dtype=model.dtype,
            device=self.device,
        )
