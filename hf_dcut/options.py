"""What each field of `GenerationConfig` does under `dcut`: as in plain `generate`, nothing, or it is refused.

A field that asks for something which is not done is refused by name; nothing is ignored in silence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

EQUAL, LAW = "equal to plain generate", "same law as plain generate"
INERT, REFUSED = "no effect", "refused by name"


@dataclass(frozen=True, slots=True)
class Option:
    """How one field is treated.

    Attributes:
        treatment: `EQUAL`, `LAW`, `INERT` or `REFUSED`.
        neutral: values, besides None, that ask for nothing; a refused field may have these.
        instead: what to do when it is refused, or why it has no effect.
    """

    treatment: str
    neutral: tuple[Any, ...] = ()
    instead: str = ""


_BEAMS = "beam search keeps several hypotheses: generate without dcut"
_ASSIST = "set the budget in dcut=DCutConfig(...) instead"


def _all(names: str, option: Option) -> dict[str, Option]:
    return dict.fromkeys(names.split(), option)


OPTIONS: dict[str, Option] = {
    **_all("max_length max_new_tokens min_length min_new_tokens max_time stop_strings", Option(EQUAL)),
    **_all("eos_token_id pad_token_id bos_token_id return_dict_in_generate output_scores output_logits", Option(EQUAL)),
    **_all("repetition_penalty encoder_repetition_penalty no_repeat_ngram_size bad_words_ids", Option(EQUAL)),
    **_all("forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens", Option(EQUAL)),
    **_all("sequence_bias exponential_decay_length_penalty renormalize_logits remove_invalid_values", Option(EQUAL)),
    **_all("watermarking_config prefill_chunk_size prompt_lookup_num_tokens max_matching_ngram_size", Option(EQUAL)),
    "encoder_no_repeat_ngram_size": Option(EQUAL),
    **_all("do_sample num_return_sequences temperature top_k top_p top_h min_p typical_p", Option(LAW)),
    **_all("epsilon_cutoff eta_cutoff", Option(LAW)),
    **_all("early_stopping length_penalty", Option(INERT, instead="only read by beam search")),
    "decoder_start_token_id": Option(INERT, instead="only read by encoder-decoder models"),
    **_all(
        "compile_config disable_compile max_cache_len cache_config",
        Option(INERT, instead="about upstream's own caches and compiled forward"),
    ),
    **_all("continuous_batching_config transformers_version", Option(INERT, instead="not about generate")),
    **_all(
        "is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold "
        "assistant_lookbehind target_lookbehind assistant_ensemble_weight",
        Option(INERT, instead="about upstream's own assisted decoding"),
    ),
    "use_cache": Option(REFUSED, (True,), "dcut needs its K/V cache: leave use_cache at True"),
    "cache_implementation": Option(REFUSED, ("dynamic",), "dcut brings its own static cache: leave it out"),
    **_all("num_beams num_beam_groups", Option(REFUSED, (1,), _BEAMS)),
    "diversity_penalty": Option(REFUSED, (0.0,), _BEAMS),
    **_all("constraints force_words_ids", Option(REFUSED, (), _BEAMS)),
    **_all("use_mtp low_memory", Option(REFUSED, (False,), "generate without dcut")),
    **_all("assistant_early_exit speculation_type", Option(REFUSED, (), _ASSIST)),
    **_all("penalty_alpha dola_layers", Option(REFUSED, (), "generate without dcut")),
    **_all("output_attentions output_hidden_states", Option(REFUSED, (False,), "packed rows have none to give")),
    "token_healing": Option(REFUSED, (False,), "heal the prompts before generating"),
    "guidance_scale": Option(
        REFUSED, (1, 1.0), "classifier-free guidance runs a second forward: generate without dcut"
    ),
}


def check_options(config: GenerationConfig) -> None:
    """Raises ValueError for the first field that asks for something which dcut does not do, or does not know."""
    for name in vars(GenerationConfig()):
        check_option(name, getattr(config, name, None))


def check_option(name: str, value: object) -> None:
    """Raises ValueError when this field of `GenerationConfig` asks for something which dcut does not do or know."""
    option = OPTIONS.get(name)
    if name.startswith("_") or value is None:
        return
    if option is None:
        raise ValueError(f"{name}={value!r}: this version of hf-dcut does not know the option. Generate without dcut")
    if option.treatment == REFUSED and value not in option.neutral:
        raise ValueError(f"{name}={value!r} does not work with dcut: {option.instead}")
