"""What each field of `GenerationConfig` means under `dcut`: as in plain `generate`, no effect, or refused.

A field that asks for something which is not done is refused by name; nothing is ignored in silence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

EQUAL, INERT, REFUSED = "equal to plain generate", "no effect", "refused by name"


@dataclass(frozen=True, slots=True)
class Option:
    """How one field is treated.

    Attributes:
        treatment: `EQUAL`, `INERT` or `REFUSED`.
        neutral: values, besides None, that ask for nothing; a refused field may have these.
        instead: what to do when it is refused, or why it has no effect.
    """

    treatment: str
    neutral: tuple[Any, ...] = ()
    instead: str = ""


_BEAMS = "beam search keeps several hypotheses: generate without dcut"
_GREEDY = "only read when sampling"
_ASSIST = "set the budget in dcut=DCutConfig(...) instead"

OPTIONS: dict[str, Option] = {
    **dict.fromkeys(("max_length", "max_new_tokens", "eos_token_id", "pad_token_id", "bos_token_id"), Option(EQUAL)),
    **dict.fromkeys(("return_dict_in_generate", "prefill_chunk_size", "prompt_lookup_num_tokens"), Option(EQUAL)),
    "max_matching_ngram_size": Option(EQUAL),
    **dict.fromkeys(
        ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
        Option(INERT, instead=_GREEDY),
    ),
    **dict.fromkeys(("early_stopping", "length_penalty"), Option(INERT, instead="only read by beam search")),
    "decoder_start_token_id": Option(INERT, instead="only read by encoder-decoder models"),
    **dict.fromkeys(
        ("compile_config", "disable_compile", "max_cache_len", "cache_config"),
        Option(INERT, instead="about upstream's own caches and compiled forward"),
    ),
    **dict.fromkeys(
        ("continuous_batching_config", "transformers_version"), Option(INERT, instead="not about generate")
    ),
    **dict.fromkeys(
        (
            "is_assistant",
            "num_assistant_tokens",
            "num_assistant_tokens_schedule",
            "assistant_confidence_threshold",
            "assistant_lookbehind",
            "target_lookbehind",
            "assistant_ensemble_weight",
        ),
        Option(INERT, instead="about upstream's own assisted decoding"),
    ),
    "do_sample": Option(REFUSED, (False,), "pass do_sample=False; many chat models and pipelines sample by default"),
    "num_return_sequences": Option(REFUSED, (1,), "repeat the prompts instead"),
    "use_cache": Option(REFUSED, (True,), "dcut needs its K/V cache: leave use_cache at True"),
    "cache_implementation": Option(REFUSED, ("dynamic", "hybrid"), "dcut brings its own static cache: leave it out"),
    **dict.fromkeys(("num_beams", "num_beam_groups"), Option(REFUSED, (1,), _BEAMS)),
    "diversity_penalty": Option(REFUSED, (0.0,), _BEAMS),
    **dict.fromkeys(("constraints", "force_words_ids"), Option(REFUSED, (), _BEAMS)),
    **dict.fromkeys(("use_mtp", "low_memory"), Option(REFUSED, (False,), "generate without dcut")),
    **dict.fromkeys(("assistant_early_exit", "speculation_type"), Option(REFUSED, (), _ASSIST)),
    **dict.fromkeys(("penalty_alpha", "dola_layers"), Option(REFUSED, (), "generate without dcut")),
    **dict.fromkeys(
        ("output_attentions", "output_hidden_states"), Option(REFUSED, (False,), "packed rows have none to give")
    ),
    **dict.fromkeys(("output_scores", "output_logits"), Option(REFUSED, (False,), "not yet supported with dcut")),
    **dict.fromkeys(
        ("stop_strings", "max_time", "watermarking_config"), Option(REFUSED, (), "not yet supported with dcut")
    ),
    "token_healing": Option(REFUSED, (False,), "heal the prompts before generating"),
    "guidance_scale": Option(
        REFUSED, (1, 1.0), "classifier-free guidance runs a second forward: generate without dcut"
    ),
    **dict.fromkeys(
        ("min_length", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
        Option(REFUSED, (0,), "not yet supported with dcut"),
    ),
    **dict.fromkeys(
        ("repetition_penalty", "encoder_repetition_penalty"), Option(REFUSED, (1.0,), "not yet supported with dcut")
    ),
    **dict.fromkeys(
        ("renormalize_logits", "remove_invalid_values"), Option(REFUSED, (False,), "not yet supported with dcut")
    ),
    **dict.fromkeys(
        (
            "min_new_tokens",
            "bad_words_ids",
            "forced_bos_token_id",
            "forced_eos_token_id",
            "exponential_decay_length_penalty",
            "suppress_tokens",
            "begin_suppress_tokens",
            "sequence_bias",
        ),
        Option(REFUSED, (), "not yet supported with dcut"),
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
