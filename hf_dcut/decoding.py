"""The decoding method that the original `generate` calls: from what it prepared to requests, and through the engine."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from hf_dcut.assembly import open_engine
from hf_dcut.choosing import reads_scores_alone
from hf_dcut.config import DCutConfig
from hf_dcut.drafters import AutoDrafter, is_drafter
from hf_dcut.drafters.base import Drafter
from hf_dcut.drafters.prompt_lookup import PromptLookupDrafter
from hf_dcut.options import check_options
from hf_dcut.padded import DCutOutput, output_of, pad_of, prompts_of
from hf_dcut.processors import Given, criteria_of, processors_of
from hf_dcut.requests import Request
from hf_dcut.seeds import Seeds
from hf_dcut.streaming import check_streamer, listeners
from hf_dcut.target import check_model

# What `generate` prepares for every decoder-only model and we either use or rebuild.
_PREPARED = {"attention_mask", "position_ids", "cache", "logits_to_keep", "use_cache"}


class Decoding:
    """The decoding method that the original `generate` calls once everything is prepared.

    Its parameters are named as those of Transformers' own methods: other names would be taken out of the user's
    keywords before these are looked at.
    """

    def __init__(self, config: DCutConfig, assistant: object, seeds: Seeds, given: Given, streamer: Any):
        self.config, self.assistant, self.seeds, self.given, self.streamer = config, assistant, seeds, given, streamer

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
        check_options(generation_config)
        check_model(model)
        check_streamer(self.streamer, len(input_ids))
        _refuse_extras(model_kwargs)
        drafter = _drafter(self.assistant, generation_config, self.config)
        prompts, mask = prompts_of(input_ids, model_kwargs), model_kwargs.get("attention_mask")
        processors = processors_of(model, generation_config, logits_processor, self.given, input_ids, mask)
        requests = self._requests(prompts, input_ids.shape[1], generation_config, processors, stopping_criteria)
        _check_proposals(self.config, drafter, requests)
        longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
        records = bool(generation_config.return_dict_in_generate)
        with open_engine(
            model, drafter, self.config, len(requests), max(map(len, prompts)), longest, records
        ) as engine:
            for request, listener in zip(requests, listeners(self.streamer, input_ids), strict=True):
                request.listener = listener
            for _ in engine.run(requests):
                pass
            stats = engine.stats
        return output_of(input_ids, requests, generation_config, stats)

    def _requests(
        self,
        prompts: list[list[int]],
        width: int,
        config: GenerationConfig,
        processors: list[LogitsProcessorList],
        criteria: StoppingCriteriaList,
    ) -> list[Request]:
        """Returns one request a row.

        Args:
            prompts: token ids of each row, without padding.
            width: P, of the padded rows.
            config: final.
            processors: of each row.
            criteria: of all.
        """
        asked, ends, longest = criteria_of(criteria)
        seeds = self.seeds.draw(len(prompts)) if config.do_sample else [0] * len(prompts)
        return [
            Request(
                id=row,
                prompt=prompt,
                # One token at least: a width that is passed already is noticed after the first, as in `generate`.
                max_new_tokens=max(1, longest - width),
                eos=ends,
                seed=seeds[row],
                left_pads=width - len(prompt),
                generation_config=config,
                pad=pad_of(config),
                samples=bool(config.do_sample),
                processors=processors[row],
                walks=not reads_scores_alone(processors[row]),
                criteria=asked,
                keeps_scores=bool(config.return_dict_in_generate and config.output_scores),
                keeps_logits=bool(config.return_dict_in_generate and config.output_logits),
            )
            for row, prompt in enumerate(prompts)
        ]


def _drafter(assistant: object, generation_config: GenerationConfig, config: DCutConfig) -> Drafter | None:
    """Returns who proposes: the assistant, or prompt lookup if its option is set; None for plain decoding."""
    lookup = generation_config.prompt_lookup_num_tokens
    if assistant is not None and lookup is not None:
        raise ValueError(f"assistant_model and prompt_lookup_num_tokens={lookup} are two drafters: give one of them")
    if isinstance(assistant, nn.Module) and is_drafter(assistant):
        assistant = AutoDrafter.from_module(assistant)
    if assistant is not None and not isinstance(assistant, Drafter):
        raise TypeError(
            f"assistant_model is a {type(assistant).__name__}, which dcut cannot draft with: give a drafter, such as "
            f"hf_dcut.AutoDrafter.from_pretrained(folder_or_hub_id), or prompt_lookup_num_tokens"
        )
    if config.budget == "none":
        return None
    if lookup is not None:
        return PromptLookupDrafter(lookup, generation_config.max_matching_ngram_size or 2)
    if assistant is None:
        raise ValueError(
            "dcut needs a drafter: pass assistant_model=hf_dcut.AutoDrafter.from_pretrained(folder_or_hub_id) or "
            "prompt_lookup_num_tokens=10, or decode plainly with dcut='none'"
        )
    return assistant


def _check_proposals(config: DCutConfig, drafter: Drafter | None, requests: list[Request]) -> None:
    """Raises ValueError when drafts cannot be sampled as asked; without sampling requests they are greedy anyway."""
    if config.proposals == "greedy" or drafter is None or not requests[0].samples:
        return
    if not drafter.independent:
        raise ValueError(
            f"dcut proposals='sampled' needs a drafter whose places do not depend on each other's draws, such as "
            f"DFlash, and this is a {type(drafter).__name__}: leave proposals at 'greedy'"
        )
    walked = {type(p).__name__ for request in requests if request.walks for p in request.processors or ()}
    if walked:
        raise ValueError(
            f"dcut proposals='sampled' warps drafts by the processors too, which must look at scores alone, and these "
            f"are {', '.join(sorted(walked))}: leave proposals at 'greedy'"
        )


def _refuse_extras(model_kwargs: dict[str, Any]) -> None:
    """Raises ValueError for forward keywords that are not handled, by name."""
    foreign = [name for name, value in model_kwargs.items() if name not in _PREPARED and value is not None]
    if foreign:
        raise ValueError(f"{', '.join(foreign)} does not work with dcut: leave it out, or generate without dcut")
    if getattr(model_kwargs.get("cache"), "_is_user_defined", False):
        raise ValueError(
            "past_key_values (cache) does not work with dcut, which brings its own: pass the whole prompt instead"
        )
