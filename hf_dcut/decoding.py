"""The decoding method that the original `generate` calls: its requests go through the engine, and into one tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from hf_dcut.assembly import open_engine
from hf_dcut.config import DCutConfig
from hf_dcut.drafters import AutoDrafter, is_drafter
from hf_dcut.drafters.base import Drafter
from hf_dcut.drafters.best_of import BestOf
from hf_dcut.drafters.prompt_lookup import LONGEST_MATCH, PromptLookupDrafter
from hf_dcut.padded import DCutOutput, output_of
from hf_dcut.preparing import Preparing
from hf_dcut.ranks import settings
from hf_dcut.requests import Request
from hf_dcut.stats import Stats
from hf_dcut.streaming import check_streamer, listeners
from hf_dcut.tiers import reads_scores_alone


class Decoding:
    """The decoding method that the original `generate` calls once everything is prepared.

    Its parameters are named as those of Transformers' own methods: other names would be taken out of the user's
    keywords before these are looked at.

    Args:
        config: how drafts are cut.
        assistant: what was given as `assistant_model`.
        streamer: as for `generate`.
        prepare: makes the requests.
    """

    def __init__(self, config: DCutConfig, assistant: object, streamer: Any, prepare: Preparing):
        self.config, self.assistant, self.streamer, self.prepare = config, assistant, streamer, prepare

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> DCutOutput | Tensor:
        """Returns the sequences, int64 [B, P + longest]; with stats if `return_dict_in_generate`.

        Args:
            model: the target.
            input_ids: int64 [B, P], left-padded.
            logits_processor, stopping_criteria: made by Transformers from the final config.
            generation_config: final, with special tokens as tensors.
            model_kwargs: what Transformers prepared for the forward, and what the user added to it.
        """
        check_streamer(self.streamer, len(input_ids))
        requests = self.prepare(
            model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs
        )
        drafter = drafter_for(self.assistant, generation_config, self.config)
        for request, listener in zip(requests, listeners(self.streamer, input_ids), strict=True):
            check_proposals(self.config, drafter, request)
            request.listener = listener
        prompt, longest = max(len(r.prompt) for r in requests), max(r.reach for r in requests)
        stats = Stats(records=[] if generation_config.return_dict_in_generate else None)
        facts = {"input_ids": [r.prompt for r in requests], "generation_config": settings(generation_config)}
        with open_engine(model, drafter, self.config, len(requests), prompt, longest, stats, facts=facts) as engine:
            for _ in engine.run(requests):
                pass
        return output_of(input_ids, requests, generation_config, stats)


def drafter_for(assistant: object, generation_config: GenerationConfig, config: DCutConfig) -> Drafter | None:
    """Returns who proposes: the assistant, prompt lookup if its option is set, or both; None for plain decoding.

    Raises:
        TypeError: an assistant that cannot draft.
        ValueError: no drafter where the budget needs one, or a lookup of no tokens.
    """
    if isinstance(assistant, nn.Module) and is_drafter(assistant):
        assistant = AutoDrafter.from_module(assistant)
    if assistant is not None and not isinstance(assistant, Drafter):
        raise TypeError(
            f"assistant_model is a {type(assistant).__name__}, which dcut cannot draft with: give a drafter, such as "
            f"hf_dcut.AutoDrafter.from_pretrained(folder_or_hub_id), or prompt_lookup_num_tokens"
        )
    if config.budget == "none":
        return None
    lookup, longest = generation_config.prompt_lookup_num_tokens, generation_config.max_matching_ngram_size
    if lookup is not None:
        by_lookup = PromptLookupDrafter(lookup, longest or LONGEST_MATCH)
        return by_lookup if assistant is None else BestOf([assistant, by_lookup])
    if assistant is None:
        raise ValueError(
            "dcut needs a drafter: pass assistant_model=hf_dcut.AutoDrafter.from_pretrained(folder_or_hub_id) or "
            "prompt_lookup_num_tokens=10, or decode plainly with dcut='none'"
        )
    return assistant


def check_proposals(config: DCutConfig, drafter: Drafter | None, request: Request) -> None:
    """Raises ValueError when drafts cannot be sampled as asked; without sampling requests they are greedy anyway."""
    if config.proposals == "greedy" or drafter is None or not request.samples:
        return
    if not drafter.independent:
        raise ValueError(
            f"dcut proposals='sampled' needs a drafter whose places do not depend on each other's draws, such as "
            f"DFlash alone, and this is {drafter}: leave proposals at 'greedy'"
        )
    processors = {*(request.processors or ()), *(request.walked or ())}
    others = sorted({type(p).__name__ for p in processors if not reads_scores_alone([p])})
    if others:
        raise ValueError(
            f"dcut proposals='sampled' warps drafts by the processors too, which must look at scores alone, and these "
            f"do not: {', '.join(others)}. Leave proposals at 'greedy'"
        )
