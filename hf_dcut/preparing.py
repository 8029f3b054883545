"""From what the original `generate` prepared for a call to requests: the one place where requests are made."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from hf_dcut.media import MEDIA_INPUTS, has_media, media_of, takes_media
from hf_dcut.options import check_options
from hf_dcut.padded import pad_of, prompts_of, wants_logprobs
from hf_dcut.processors import criteria_of, processors_of
from hf_dcut.ranks import Ranks
from hf_dcut.recurrence import delta_layers
from hf_dcut.requests import Request
from hf_dcut.seeds import Seeds
from hf_dcut.trial import check_model

# What `generate` prepares for every decoder-only model and we either use or rebuild.
_PREPARED = {"attention_mask", "position_ids", "cache", "logits_to_keep", "use_cache"}


class Preparing:
    """A decoding method for the original `generate` that stops where decoding would begin.

    Its parameters are named as those of Transformers' own methods: other names would be taken out of the user's
    keywords before these are looked at.

    Args:
        seeds: where seeds come from.
        logprobs: whether log-probabilities are kept; what the config says when None.
        lookup: `prompt_lookup_num_tokens` that was kept from Transformers, which the final config gets back; or None.
    """

    def __init__(self, seeds: Seeds, logprobs: object, lookup: int | None):
        self.seeds, self.logprobs, self.lookup = seeds, logprobs, lookup

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> list[Request]:
        """Returns one request a row.

        Args:
            model: the target.
            input_ids: int64 [B, P], left-padded.
            logits_processor, stopping_criteria: made by Transformers from the final config.
            generation_config: final, with special tokens as tensors.
            model_kwargs: what Transformers prepared for the forward, and what the user added to it.

        Raises:
            ValueError: an option, a model, a mask or a keyword that dcut does not handle.
        """
        config, width = generation_config, input_ids.shape[1]
        if self.lookup is not None:
            config.prompt_lookup_num_tokens = self.lookup
        check_options(config)
        check_model(model)
        _refuse_extras(model, model_kwargs)
        images = has_media(model_kwargs)
        prompts = prompts_of(input_ids, model_kwargs, images)
        pads = [width - len(prompt) for prompt in prompts]
        media = media_of(input_ids, pads, model_kwargs) if images else []
        processors, walked = processors_of(logits_processor, len(prompts))
        asked, ends, longest = criteria_of(stopping_criteria, len(prompts))
        ranks = Ranks.of(model)
        in_full, logprobs = bool(config.return_dict_in_generate), wants_logprobs(config, self.logprobs)
        seeds = self.seeds.draw(len(prompts)) if config.do_sample else [0] * len(prompts)
        return [
            Request(
                id=row,
                prompt=prompt,
                # One token at least: a width that is passed already is noticed after the first, as in `generate`.
                max_new_tokens=max(1, longest - width),
                eos=ends,
                seed=seeds[row],
                left_pads=pads[row],
                rope=media[row].rope if media else 0,
                media=media[row] if media else None,
                generation_config=config,
                pad=pad_of(config),
                samples=bool(config.do_sample),
                processors=processors,
                row=row,
                walked=walked[row],
                criteria=ranks.agreed(asked[row]),
                keeps_scores=in_full and bool(config.output_scores),
                keeps_logits=in_full and bool(config.output_logits),
                keeps_logprobs=logprobs,
            )
            for row, prompt in enumerate(prompts)
        ]


def _refuse_extras(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> None:
    """Raises ValueError for forward keywords that are not handled, by name."""
    known = _PREPARED | MEDIA_INPUTS if takes_media(model) else _PREPARED
    foreign = [name for name, value in model_kwargs.items() if name not in known and value is not None]
    if foreign:
        raise ValueError(f"{', '.join(foreign)} does not work with dcut: leave it out, or generate without dcut")
    if delta_layers(model) and has_media(model_kwargs):
        raise ValueError(
            f"{type(model).__name__} has recurrent layers, whose states behind an image dcut does not take over: leave "
            f"images out, or generate without dcut"
        )
    if getattr(model_kwargs.get("cache"), "_is_user_defined", False):
        raise ValueError(
            "past_key_values (cache) does not work with dcut, which brings its own: pass the whole prompt instead"
        )
