"""The fields of other servers' requests, for all dialects, and the treatment of each.

A field that changes the answer of some server is honoured or refused by name: an answer that looks
right but ignores a constraint is worse than none. Fields that only hint (where to cache, which
figures to report) are accepted without effect. ``docs/conformance.md`` shows the list. A field that
is neither in it nor ours is ignored and named, so newer clients keep working (``unknown_fields``).
``foreign_request`` applies the list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from engines.openai.messages import Json
from engines.openai.requests import NO_LIMIT

VLLM, LLAMA, OLLAMA, LM_STUDIO, SGLANG = "vLLM", "llama.cpp", "Ollama", "LM Studio", "SGLang"
MLX_LM, OTHERS = "mlx_lm.server", "DeepSeek, Mistral, Moonshot, OpenRouter, Qwen"
SIBLINGS: Final = "The other dialects here"
SERVERS: Final = (VLLM, LLAMA, OLLAMA, LM_STUDIO, SGLANG, MLX_LM, OTHERS, SIBLINGS)


class Fate(Enum):
    """The treatment of a field whose value asks for something."""

    HONOURED = "honoured"
    ON_VLLM = "honoured on vLLM, refused on mlx"
    # It changes what an answer shows, which only OpenAI's chats and text completions can represent.
    SHOWN_ON_VLLM = "on vLLM honoured in chats and text completions; refused elsewhere"
    REFUSED = "refused"
    HINT = "accepted, has no effect"


# Returns the fields of a chat that a value stands for; raises ``ValueError`` if it is invalid.
Make: TypeAlias = Callable[[Any], Json]
_OFF: Final[tuple[object, ...]] = (False, 0, "", [], {})
_ON: Final = (True,)  # by default


class ForeignField(NamedTuple):
    """A field that is not OpenAI's."""

    name: str
    servers: tuple[str, ...]
    fate: Fate
    words: str  # the field of ours that it stands for, or advice
    make: Make | None  # None: the engine has a field of this name, or it is not honoured
    neutral: tuple[object, ...]  # values without effect, besides null
    beside: tuple[str, ...]  # it has an effect only beside one of these; () = always

    def asks(self, value: object) -> bool:
        """Return whether a value of the field asks for something."""
        return value is not None and value not in self.neutral


_Made: TypeAlias = Iterator[ForeignField]


def _means(
    words: str,
    make: Make,
    names: str,
    *servers: str,
    fate: Fate = Fate.HONOURED,
    neutral: tuple[object, ...] = (),
) -> _Made:
    for name in names.split():
        yield ForeignField(name, servers, fate, words, make, neutral, ())


def _on_vllm(names: str, *servers: str, neutral: tuple[object, ...] = _OFF) -> _Made:
    for name in names.split():
        yield ForeignField(name, servers, Fate.ON_VLLM, "", None, neutral, ())


def _shown_on_vllm(names: str, *servers: str, neutral: tuple[object, ...] = _OFF) -> _Made:
    for name in names.split():
        yield ForeignField(name, servers, Fate.SHOWN_ON_VLLM, "", None, neutral, ())


def _refused(
    names: str,
    *servers: str,
    words: str = "leave it out",
    neutral: tuple[object, ...] = _OFF,
    beside: tuple[str, ...] = (),
) -> _Made:
    for name in names.split():
        yield ForeignField(name, servers, Fate.REFUSED, words, None, neutral, beside)


def _hint(names: str, *servers: str, words: str = "") -> _Made:
    for name in names.split():
        yield ForeignField(name, servers, Fate.HINT, words, None, _OFF, ())


def _schema(value: Any) -> Json:
    """Return the format for a JSON schema, or for any JSON (Ollama's value ``json``)."""
    if value == "json":
        return {"response_format": {"type": "json_object"}}
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"it is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("a JSON schema is needed, as an object")
    is_named = isinstance(value.get("schema"), dict) and not set(_KEYWORDS[1:]) & value.keys()
    named = {"name": "answer"} | (value if is_named else {"schema": value})
    return {"response_format": {"type": "json_schema", "json_schema": named}}


_BESIDE: Final = ("name", "strict")  # fields beside the schema in a format
_KEYWORDS: Final = ("type", "properties", "items", "$ref", "anyOf", "oneOf", "allOf", "enum")


def wider_format(value: Any) -> Any:
    """Return a ``response_format`` of other servers in OpenAI's form.

    Schema, name and ``strict`` may be beside ``type``, also for ``json_object``; the schema may
    replace all three; ``strict`` may be a text. Raises ``ValueError`` for an invalid schema.
    """
    if not isinstance(value, dict) or value.get("type") not in ("json_object", "json_schema"):
        return value
    beside = value.get("schema") if value.get("json_schema") is None else None
    form = value if beside is None else _schema(beside)["response_format"]
    if not isinstance(named := form.get("json_schema"), dict):
        return form
    if "schema" not in named and any(x in named for x in _KEYWORDS):
        beside = {x: named[x] for x in _BESIDE if x in named}
        named = {**beside, "schema": {x: named[x] for x in named if x not in _BESIDE}}
    named = {"name": "answer"} | named | {x: value[x] for x in _BESIDE if value.get(x) is not None}
    if named.get("strict") in ("true", "false"):
        named["strict"] = named["strict"] == "true"
    held = {**form, "type": "json_schema", "json_schema": named}
    return held if named.get("schema") is not None else {"type": "json_object"}


def _formatted(value: Any) -> Json:
    """Return the format for that of Responses and Messages, which have ``json_schema`` flat."""
    if not isinstance(value, dict):
        raise ValueError("an object is needed, such as {type: json_schema, schema: {}}")
    kind = value.get("type", "text")
    if kind != "json_schema":
        return {} if kind == "text" else {"response_format": {"type": kind}}
    made = _schema(value.get("schema"))
    made["response_format"]["json_schema"] |= {
        x: value[x] for x in _BESIDE if value.get(x) is not None
    }
    return made


def _configured(value: Any) -> Json:
    if not isinstance(value, dict):
        raise ValueError("an object is needed, such as {format: {type: json_schema, schema: {}}}")
    made = _formatted(value["format"]) if value.get("format") is not None else {}
    return made | ({"reasoning_effort": value["effort"]} if value.get("effort") else {})


def _stops(value: Any) -> Json:
    return {"stop": value}


def _any_json(value: Any) -> Json:
    return _schema("json")


def _held(name: str) -> Make:
    return lambda value: {"structured_outputs": {name: value}}


def _limit(value: Any) -> Json:
    is_none = isinstance(value, int | float) and value < 0
    return {"max_tokens": NO_LIMIT if is_none else value}


def _penalty(value: Any) -> Json:
    return {"repetition_penalty": value}


def _think(value: Any) -> Json:
    if isinstance(value, bool):
        return {"chat_template_kwargs": {"enable_thinking": value}}
    return {"reasoning_effort": value}


def _reasoning(value: Any) -> Json:
    if isinstance(value, str):
        return _think({"on": True, "off": False}.get(value, value))
    if not isinstance(value, dict):
        raise ValueError("an object is needed, such as {effort: low}")
    for name in ("max_tokens", "exclude"):
        if value.get(name):
            raise ValueError(f"{name} is not supported here: leave it out")
    if value.get("enabled") is False:
        return {"reasoning_effort": "none"}
    if value.get("effort"):
        return {"reasoning_effort": value["effort"]}
    return _think(True) if value.get("enabled") else {}


def _thinking(value: Any) -> Json:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("enabled", "disabled", "adaptive", "auto"):
        raise ValueError("an object is needed, such as {type: disabled}")
    return _think(kind != "disabled")


def _switch(value: Any) -> Json:
    if not isinstance(value, bool):
        raise ValueError("true or false is needed")
    return _think(value)


def _seed(value: Any) -> Json:
    return {"seed": value}


_GRAMMAR: Final = "`structured_outputs.grammar`"
_NO_LIMIT: Final = "`max_tokens`; below 0: no limit"
_TEMPLATE: Final = "the template is the server's: another one would be code that we run"
_IMAGES: Final = "send images as parts of a message: {type: image_url}"
_SYSTEM: Final = "send a system message"
_MESSAGES: Final = "send the earlier messages"
_ADAPTER: Final = "adapters are served as models of their own"
_INSIDE: Final = "on vLLM, send it inside structured_outputs"
_THOUGHTS: Final = "reasoning is always returned, as reasoning_content"
_PENALTIES: Final = ("repeat_penalty", "repetition_penalty", "presence_penalty")
_PRIVATE: Final = "only the gateway sets it"
_PART: Final = "an option of a field that is refused"
_SWITCHED: Final = "`chat_template_kwargs.enable_thinking`"
_EFFORT: Final = "send reasoning_effort, or chat_template_kwargs"
_SEEN: Final = "the server decides how images are read"
_WHOLE: Final = "penalties look at the whole conversation: leave it out"
_MESSAGE: Final = "describe the task in a message"
_GO_ON: Final = "on vLLM, send continue_final_message and add_generation_prompt: false"

FOREIGN_FIELDS: Final[tuple[ForeignField, ...]] = (
    # Constraints.
    *_means("`response_format`", _schema, "guided_json", VLLM),
    *_means("`response_format`", _schema, "json_schema", LLAMA, SGLANG),
    *_means("`response_format`; a schema, or `json`", _schema, "format", OLLAMA, neutral=("",)),
    *_means("`response_format`", _any_json, "guided_json_object", VLLM, neutral=(False,)),
    *_means("`structured_outputs.regex`", _held("regex"), "guided_regex", VLLM),
    *_means("`structured_outputs.regex`", _held("regex"), "regex", SGLANG),
    *_means("`structured_outputs.choice`", _held("choice"), "guided_choice", VLLM),
    *_means(_GRAMMAR, _held("grammar"), "guided_grammar", VLLM, fate=Fate.ON_VLLM),
    *_means(_GRAMMAR, _held("grammar"), "grammar", LLAMA, fate=Fate.ON_VLLM, neutral=("",)),
    *_means(_GRAMMAR, _held("grammar"), "ebnf", SGLANG, fate=Fate.ON_VLLM),
    *_refused("guided_whitespace_pattern", VLLM, words=_INSIDE),
    *_refused("structural_tag", VLLM, SGLANG, words=_INSIDE),
    *_refused("grammar_lazy grammar_triggers preserved_tokens", LLAMA),
    *_hint("guided_decoding_backend stream_interval", VLLM),
    *_hint("grammar_type", LLAMA, words=_PART),
    *_on_vllm("bad_words allowed_token_ids", VLLM),
    *_refused("custom_logit_processor custom_params", SGLANG),
    *_refused("logits_processors", VLLM),
    # Ends.
    *_means(_NO_LIMIT, _limit, "n_predict", LLAMA),
    *_means(_NO_LIMIT, _limit, "num_predict", OLLAMA),
    *_means(_NO_LIMIT, _limit, "max_new_tokens", SGLANG),
    *_means(_NO_LIMIT, _limit, "max_output_tokens", LM_STUDIO),
    *_means(_NO_LIMIT, _limit, "max_tokens max_completion_tokens", SIBLINGS),
    *_on_vllm("stop_token_ids", VLLM, SGLANG),
    *_on_vllm("thinking_token_budget repetition_detection", VLLM),
    *_refused("stop_regex", SGLANG, words="send stop"),
    *_refused("no_stop_trim", SGLANG, words="on vLLM, send include_stop_str_in_output"),
    *_refused("n_indent", LLAMA),
    *_refused("t_max_predict_ms", LLAMA, neutral=(-1, 0)),
    # Of the other dialects.
    *_means("`stop`", _stops, "stop_sequences", SIBLINGS, neutral=([],)),
    *_means("`response_format`", _formatted, "output_format", SIBLINGS),
    *_means("`response_format`, `reasoning_effort`", _configured, "output_config", SIBLINGS),
    *_means("`response_format`", _configured, "text", SIBLINGS),
    *_refused("instructions", SIBLINGS, words=_SYSTEM),
    *_refused("extra_body guided_decoding", OTHERS, words="send its fields themselves"),
    # Sampling.
    *_means(
        *("`repetition_penalty`", _penalty, "repeat_penalty", LLAMA, OLLAMA, LM_STUDIO),
        neutral=(1,),
    ),
    *_refused(
        *("repeat_last_n", LLAMA, OLLAMA),
        words="penalties look at the whole conversation: send -1",
        neutral=(-1,),
        beside=(*_PENALTIES, "frequency_penalty"),
    ),
    *_refused("repetition_context_size", MLX_LM, words=_WHOLE, beside=("repetition_penalty",)),
    *_refused("presence_context_size", MLX_LM, words=_WHOLE, beside=("presence_penalty",)),
    *_refused("frequency_context_size", MLX_LM, words=_WHOLE, beside=("frequency_penalty",)),
    *_means("`seed`", _seed, "random_seed", OTHERS),
    *_refused("top_a tfs mirostat_mode smoothing_factor banned_strings banned_tokens", OTHERS),
    *_refused("samplers sampler_seq", LLAMA, words="samplers have one order here"),
    *_refused("mirostat", LLAMA, OLLAMA),
    *_refused("dynatemp_range dry_multiplier min_keep", LLAMA),
    *_refused("xtc_probability", LLAMA, MLX_LM),
    *_refused("typical_p typ_p tfs_z", LLAMA, OLLAMA, neutral=(1,)),
    *_refused("top_n_sigma adaptive_target", LLAMA, neutral=(-1, 0)),
    *_hint("mirostat_tau mirostat_eta", LLAMA, OLLAMA, words=_PART),
    *_hint("xtc_threshold", LLAMA, MLX_LM, words=_PART),
    *_hint("dynatemp_exponent dry_base dry_allowed_length", LLAMA, words=_PART),
    *_hint("dry_penalty_last_n dry_sequence_breakers adaptive_decay", LLAMA, words=_PART),
    *_hint("penalize_nl", LLAMA),
    *_hint("penalize_newline", OLLAMA),
    *_refused("n_cmpl", LLAMA, words="send n", neutral=(0, 1)),
    *_on_vllm("use_beam_search watermarking", VLLM),
    *_on_vllm("length_penalty", VLLM, neutral=(1,)),
    # Reasoning.
    *_means(
        *("`chat_template_kwargs.enable_thinking`, or `reasoning_effort`", _think, "think"),
        OLLAMA,
    ),
    *_means("`reasoning_effort`", _reasoning, "reasoning", OLLAMA, LM_STUDIO, SGLANG, OTHERS),
    *_means(_SWITCHED, _thinking, "thinking", OTHERS),
    *_means(_SWITCHED, _switch, "enable_thinking", OTHERS),
    *_refused("thinking_budget", OTHERS, words=_EFFORT),
    *_refused("prompt_mode", OTHERS, words=_EFFORT),
    *_refused(*("reasoning_format", LLAMA), words=_THOUGHTS, neutral=("", "auto", "deepseek")),
    *_refused(
        *("reasoning_budget reasoning_budget_tokens thinking_budget_tokens", LLAMA),
        words=_EFFORT,
        neutral=(-1,),
    ),
    *_hint("reasoning_budget_start_tag reasoning_budget_end_tag", LLAMA, words=_PART),
    *_hint("reasoning_budget_end_tags reasoning_budget_message", LLAMA, words=_PART),
    *_refused("thinking_forced_open reasoning_control", LLAMA),
    *_refused("separate_reasoning", SGLANG, words=_THOUGHTS, neutral=_ON),
    *_hint("stream_reasoning", SGLANG),
    *_shown_on_vllm("include_reasoning", VLLM, neutral=_ON),
    # Prompts.
    *_on_vllm("continue_final_message", VLLM, LLAMA, SGLANG),
    *_on_vllm("add_generation_prompt", VLLM, LLAMA, neutral=_ON),
    *_on_vllm("add_special_tokens documents truncate_prompt_tokens truncation_side", VLLM),
    *_refused("chat_template", VLLM, LLAMA, words=_TEMPLATE),
    *_refused("template", OLLAMA, words=_TEMPLATE),
    *_refused("prompt_embeds", VLLM, words="send text"),
    *_refused("input_ids input_embeds", SGLANG, words="send text"),
    *_refused("generation_prompt chat_format chat_parser", LLAMA, words=_TEMPLATE),
    *_refused("role_mapping", MLX_LM, words=_TEMPLATE),
    *_refused("task", SGLANG, words=_MESSAGE),
    *_refused("safe_prompt", OTHERS, words=_SYSTEM),
    *_refused("previous_input_messages", VLLM, words=_MESSAGES),
    *_refused("context", OLLAMA, words=_MESSAGES),
    *_refused("session_params", SGLANG, words=_MESSAGES),
    *_refused("system", OLLAMA, words=_SYSTEM),
    *_refused("system_prompt", LM_STUDIO, words=_SYSTEM),
    *_refused("images", OLLAMA, words=_IMAGES),
    *_refused("image_data", LLAMA, SGLANG, words=_IMAGES),
    *_refused("media_io_kwargs mm_processor_kwargs", VLLM, words=_SEEN),
    *_refused("images_config max_dynamic_patch min_dynamic_patch", SGLANG, words=_SEEN),
    *_refused("use_audio_in_video", SGLANG, words=_SEEN),
    *_refused("integrations", LM_STUDIO, words="send tools, and run them yourself"),
    *_refused("input_prefix input_suffix input_extra", LLAMA, words="send prompt and suffix"),
    *_refused("lora", LLAMA, words=_ADAPTER),
    *_refused("lora_path", SGLANG, words=_ADAPTER),
    *_refused("adapters", MLX_LM, words=_ADAPTER),
    *_refused("sampling_params", SGLANG, words="send its fields themselves"),
    *_hint("raw shift truncate", OLLAMA),
    *_refused("_debug_render_only", OLLAMA),
    # What an answer shows.
    *_shown_on_vllm("echo include_stop_str_in_output prompt_logprobs logprob_token_ids", VLLM),
    *_shown_on_vllm("return_tokens_as_token_ids return_token_offsets return_prompt_text", VLLM),
    *_shown_on_vllm("return_token_ids", VLLM, SGLANG),
    *_shown_on_vllm("skip_special_tokens", VLLM, SGLANG, neutral=_ON),
    *_shown_on_vllm("spaces_between_special_tokens", VLLM, neutral=_ON),
    *_refused("n_probs", LLAMA, words="send logprobs and top_logprobs"),
    *_refused("return_tokens", LLAMA, words="on vLLM, send return_token_ids"),
    *_refused("parse_tool_calls", LLAMA, neutral=_ON),
    *_refused("return_hidden_states return_routed_experts return_meta_info", SGLANG),
    *_refused("return_prompt_token_ids", SGLANG, words="ask /tokenize"),
    *_hint("post_sampling_probs", LLAMA, words=_PART),
    *_refused("enable_response_messages", VLLM),
    *_hint("timings_per_token return_progress response_fields verbose", LLAMA),
    *_hint("sse_ping_interval", LLAMA),
    *_hint("return_cached_tokens_details custom_labels", SGLANG),
    *_hint("routed_experts_start_len", SGLANG, words=_PART),
    # Where, when and beside which others it runs.
    *_hint("priority request_id session_id cache_salt kv_transfer_params", VLLM, words=_PRIVATE),
    *_hint("ec_transfer_params vllm_xargs mm_payload return_mm_kwargs", VLLM, words=_PRIVATE),
    *_hint("routed_experts_prompt_start", VLLM),
    *_hint("cache_prompt id_slot slot_id n_cache_reuse n_keep n_discard", LLAMA),
    *_hint("backend_sampling t_max_prompt_ms", LLAMA),
    *_hint("keep_alive num_ctx num_keep num_batch num_gpu main_gpu num_thread", OLLAMA),
    *_hint("use_mmap use_mlock low_vram numa f16_kv vocab_only draft_num_predict", OLLAMA),
    *_hint("ttl context_length", LM_STUDIO),
    *_hint("draft_model", LM_STUDIO, MLX_LM),
    *_hint("num_draft_tokens", MLX_LM),
    *_hint("rid extra_key ngram_corpus_id bootstrap_host bootstrap_port", SGLANG),
    *_hint("bootstrap_room routed_dp_rank data_parallel_rank disagg_prefill_dp_rank", SGLANG),
)
# Of each message.
IN_MESSAGES: Final[tuple[ForeignField, ...]] = (
    *_refused("prefix partial", OTHERS, words=_GO_ON),
    *_refused("images", OLLAMA, words=_IMAGES),
    *_refused("tools", SGLANG, words="send the tools beside the messages"),
)
