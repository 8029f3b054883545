"""What each field of `GenerationConfig` and parameter of `generate` does under `dcut`: as in plain `generate`, or not.

What asks for something that is not done is refused by name; nothing is ignored in silence. `docs/options.md` is made
from these tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

EQUAL, LAW = "equal to plain generate", "same law as plain generate"
OWN, INERT, REFUSED = "special to dcut", "no effect", "refused by name"


@dataclass(frozen=True, slots=True)
class Option:
    """How one field or parameter is treated.

    Attributes:
        treatment: `EQUAL`, `LAW`, `OWN`, `INERT` or `REFUSED`.
        neutral: values, besides None, that ask for nothing; what is refused may have these.
        instead: what to do when it is refused, why it has no effect, or what dcut makes of it.
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
    **_all("watermarking_config encoder_no_repeat_ngram_size", Option(EQUAL)),
    "prefill_chunk_size": Option(INERT, instead="set max_prefill_tokens in dcut=DCutConfig(...)"),
    **_all(
        "prompt_lookup_num_tokens max_matching_ngram_size",
        Option(OWN, instead="drafts are copied from the text: alone, or where that promises more than assistant_model"),
    ),
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
    "cache_implementation": Option(REFUSED, ("dynamic", "hybrid"), "dcut brings its own static cache: leave it out"),
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


# Parameters of `generate`, those that `dcut` adds, and keywords that are looked at.
PARAMETERS: dict[str, Option] = {
    "self": Option(EQUAL, instead="decoder-only models with full or sliding attention layers; others are refused"),
    "inputs": Option(EQUAL, instead="token ids, left-padded where prompts differ in length"),
    "generation_config": Option(EQUAL, instead="may hold dcut too, as a dict"),
    "logits_processor": Option(
        EQUAL, instead="a copy for each request, called with one row; `PerRequest` makes those that must know the row"
    ),
    "stopping_criteria": Option(
        EQUAL,
        instead="a copy for each request, asked once about each token of its row, or made by `PerRequest`; a row that "
        "is stopped gets pad tokens, also without EOS",
    ),
    "prefix_allowed_tokens_fn": Option(EQUAL),
    "streamer": Option(OWN, instead="a `BatchStreamer`, or for one request any of Transformers'"),
    "assistant_model": Option(OWN, instead="an hf_dcut drafter, such as `AutoDrafter.from_pretrained(...)` gives"),
    "dcut": Option(OWN, instead="True, a budget, a dict or a `DCutConfig`; False or None generates plainly"),
    "seed": Option(OWN, instead="of sampling: one integer, or one a request, on which alone its tokens depend"),
    "output_logprobs": Option(
        OWN, instead="`logprobs` of the output: of each new token under the processed scores it was chosen by"
    ),
    "generator": Option(OWN, instead="draws the seeds that are not given; without it torch's global state does"),
    "tokenizer": Option(EQUAL, instead="needed by stop_strings"),
    "attention_mask": Option(EQUAL, instead="left padding"),
    "position_ids": Option(EQUAL, instead="refused unless they count from 0 at each prompt's first token"),
    "kwargs": Option(
        EQUAL,
        instead="fields of `GenerationConfig` as below, and what a vision-language model's processor returns; what "
        "else goes to the model is refused",
    ),
    "synced_gpus": Option(REFUSED, (False,), "it is for ZeRO-3 and FSDP: generate without dcut"),
    **_all(
        "negative_prompt_ids negative_prompt_attention_mask custom_generate assistant_tokenizer",
        Option(REFUSED, instead="leave it out, or generate without dcut"),
    ),
}


def check_parameters(arguments: Mapping[str, object]) -> None:
    """Raises ValueError for the first argument of a call to `generate` that asks for something dcut does not do."""
    for name, option in PARAMETERS.items():
        value = arguments.get(name)
        if option.treatment == REFUSED and value is not None and value not in option.neutral:
            raise ValueError(f"{name} does not work with dcut: {option.instead}")


def options_table() -> str:
    """Returns docs/options.md: both tables, a row each for what is treated alike."""
    parts = [_HEADER, "## Parameters of `generate`", "", *_rows(PARAMETERS), ""]
    parts += ["## Fields of `GenerationConfig`", "", *_rows(OPTIONS)]
    return "\n".join(parts) + "\n"


_HEADER = """# Options

What `generate(..., dcut=...)` makes of each option, made from the tables in `hf_dcut/options.py`.

- *equal to plain generate*: greedy output is the same, token for token.
- *same law as plain generate*: samples follow the same distribution, drawn from other random numbers. With the same
  seed they are the same for every budget, drafter, batch size and order of the requests, unless
  `proposals="sampled"`.
- *refused by name*: an error says what to do.
"""


def _rows(table: Mapping[str, Option]) -> Iterator[str]:
    """Yields the lines of a table in Markdown, a row for what is treated alike, in the order of first appearance."""
    yield "| Option | With dcut | Remark |"
    yield "|---|---|---|"
    alike: dict[tuple[str, str], list[str]] = {}
    for name, option in table.items():
        allowed = ", ".join(f"`{value!r}`" for value in option.neutral)
        treatment = f"{option.treatment}, but for {allowed}" if allowed else option.treatment
        alike.setdefault((treatment, option.instead), []).append(name)
    for (treatment, instead), names in alike.items():
        yield f"| {', '.join(f'`{name}`' for name in names)} | {treatment} | {instead} |"


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
