"""Makes vLLM treat control tokens in users' text as plain text (``host.control_tokens``).

vLLM's registry of renderers names the class that writes the prompts for a kind of tokenizer. Our
subclasses replace those that write a prompt as one text, in which a tokenizer takes every spelling
of a control token for the token, also in a user's words. The other renderers (Mistral's, Kimi K3's,
Inkling's, and harmony for gpt-oss) tokenize each piece separately, so they need no replacement.

One thread of vLLM tokenizes all prompts, in the order of arrival. Long texts are passed to it one
at a time, so that a short one waits for one of them at most. Of a chat, only the new text is
tokenized (``host.segment_cache``).
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

from vllm.exceptions import VLLMValidationError
from vllm.renderers.base import BaseRenderer
from vllm.renderers.cohere import CohereRenderer
from vllm.renderers.deepseek_v4 import DeepseekV4Renderer
from vllm.renderers.deepseek_v32 import DeepseekV32Renderer
from vllm.renderers.hf import HfRenderer
from vllm.renderers.registry import RENDERER_REGISTRY

from engines.host.control_tokens import ControlTokens, UnreadableText, panics_refused
from engines.host.segment_cache import SegmentCache
from engines.host.work_line import WorkLine, to_its_end
from engines.openai.requests import MAX_CONTEXTS
from engines.vllm_plugin.identity import TENANT

LONG_CHARS: Final = 1 << 16  # takes some 20 ms
MAX_WAITING: Final = 4096  # requests; vLLM itself has no bound
KEY_FIELD: Final = "thermocline_key"  # in a prompt: the key of its segments, by tenant
# Renderers that treat users' text as plain, or have no such text.
PLAIN_OF_THEMSELVES: Final = frozenset({"inkling", "kimi_k3", "mistral", "terratorch"})


class _Plain(BaseRenderer):
    """Marks users' control tokens before the prompt is written, and encodes them as plain text."""

    def __init__(self, config: Any, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        self._controls = ControlTokens(tokenizer, template=self._template(tokenizer))
        self._line = WorkLine(MAX_WAITING)
        self._secret = secrets.token_bytes(32)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        template = self._template(tokenizer) or str(getattr(tokenizer, "chat_template", None) or "")

        def whole(text: str) -> list[int]:
            return list(self.get_tokenizer()(text, add_special_tokens=False)["input_ids"])

        # A copy: vLLM sets limits of length on its own.
        self.segments = SegmentCache(copy.deepcopy(backend), whole, template)

    def _template(self, tokenizer: Any) -> str:
        """The text whose tokens with bars are control tokens; "": use the tokenizer's template."""
        return ""

    def render_messages(self, messages: list[Any], params: Any) -> Any:
        return self._unmarked(*super().render_messages(*self._marked(messages, params)))

    async def render_messages_async(self, messages: list[Any], params: Any) -> Any:
        rendered = await super().render_messages_async(*self._marked(messages, params))
        return self._unmarked(*rendered)

    def _unmarked(self, conversation: Any, prompt: Any) -> Any:
        """Mark a chat's text, so that ``encode`` checks its tokens; leave other prompts as is."""
        if text := prompt.get("prompt"):
            prompt = {**prompt, "prompt": self._controls.as_chat(text)}
        return self._controls.unmarked(conversation), prompt

    def _marked(self, messages: list[Any], params: Any) -> tuple[list[Any], Any]:
        given = [_opened(x) for x in messages]
        kwargs = self._controls.marked_value(params.chat_template_kwargs)
        return self._controls.marked(given), replace(params, chat_template_kwargs=kwargs)

    async def _tokenize_singleton_prompt_async(self, prompt: Any, params: Any) -> Any:
        text, tokenized = prompt.get("prompt"), super()._tokenize_singleton_prompt_async
        if isinstance(text, str) and (tenant := TENANT.get()) is not None:
            key = hashlib.blake2b(tenant.encode(), digest_size=32, key=self._secret).digest()
            prompt = {**prompt, KEY_FIELD: key}
        if not isinstance(text, str) or len(text) < LONG_CHARS or "prompt_token_ids" in prompt:
            return await tokenized(prompt, params)
        self._check_size(len(text) // self.get_tokenizer().max_chars_per_token)
        async with self._line.turn():
            written = await to_its_end(asyncio.ensure_future(tokenized(prompt, params)))
        self._check_size(len(written["prompt_token_ids"]))
        return written

    def _check_size(self, num_tokens: int) -> None:
        """Refuse overlong texts: vLLM bounds prompts, but ``/tokenize`` would accept any length."""
        most = self.model_config.max_model_len
        if num_tokens > MAX_CONTEXTS * most:
            raise VLLMValidationError(
                f"This model's maximum context length is {most} tokens, and the text has"
                f" {num_tokens} tokens or more: send less of it.",
                parameter="prompt",
            )

    def _tokenize_prompt(self, prompt: Any, params: Any) -> Any:
        try:
            with panics_refused():
                return self._tokenized(prompt, params)
        except UnreadableText as error:
            raise VLLMValidationError(f"{error}", parameter="prompt") from error

    def _tokenized(self, prompt: Any, params: Any) -> Any:
        prompt = dict(prompt)
        key, text = prompt.pop(KEY_FIELD, None), prompt["prompt"]
        options = params.get_encode_kwargs()
        by_parts = (
            key is not None
            and not options["add_special_tokens"]
            and params.truncate_prompt_tokens is None
            and not self._wants_offsets(prompt, params)
        )
        if not by_parts and not self._controls.has_marks(text):
            return super()._tokenize_prompt(prompt, params)
        tokenizer = self.get_tokenizer()
        # No truncation: ``encode`` looks for tokens that a truncated prompt could lack. The length
        # is checked later.
        options = {**options, "truncation": False, "max_length": None}

        def whole(text: str) -> list[int]:
            return list(tokenizer(text, **options)["input_ids"])

        encode = partial(self.segments.encode, key=key) if by_parts else whole
        marked = self._controls.has_marks(text)
        ids = self._controls.encode(text, encode) if marked else encode(text)
        return self._build_tokens_prompt(ids, {**prompt, "prompt": self._controls.unmarked(text)})


class _PlainByCode(_Plain):
    """Has no template to read: all added tokens with bars are control tokens."""

    def _template(self, tokenizer: Any) -> str:
        return " ".join(tokenizer.get_added_vocab())


class PlainRenderer(_Plain, HfRenderer):
    """Writes prompts with a chat template."""


class PlainCohere(_PlainByCode, CohereRenderer):
    """Writes Cohere's prompts."""


class PlainDeepseekV32(_PlainByCode, DeepseekV32Renderer):
    """Writes DeepSeek V3.2's prompts."""


class PlainDeepseekV4(_PlainByCode, DeepseekV4Renderer):
    """Writes DeepSeek V4's prompts."""


KINDS: Final[Mapping[str, type[_Plain]]] = {
    "hf": PlainRenderer,
    "alpamayo2_super": PlainRenderer,
    "kimi_audio": PlainRenderer,
    "cohere": PlainCohere,
    "deepseek_v32": PlainDeepseekV32,
    "deepseek_v4": PlainDeepseekV4,
    "deepseek_v41": PlainDeepseekV4,
}


def _opened(message: Any) -> Any:
    """Return a message whose calls have arguments without escapes, which could hide a token."""
    if not isinstance(message, Mapping) or not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call.get("function") or {})
        if isinstance(written := function.get("arguments"), str) and "\\" in written:
            with suppress(ValueError):  # not JSON: templates get it unchanged
                function["arguments"] = json.dumps(json.loads(written), ensure_ascii=False)
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def register() -> None:
    """Make vLLM's server write prompts with our renderers. Call it before the server starts."""
    for kind, renderer in KINDS.items():
        RENDERER_REGISTRY.register(kind, __name__, renderer.__name__)
