"""Keeps users' spellings of control tokens plain text in vLLM's prompts (``host.control_tokens``).

vLLM's registry of renderers names the class that writes the prompts of a kind of tokenizer; ours
extend those that write a text, in which a tokenizer would find control tokens of any author.
The others (Mistral's, Kimi K3's, Inkling's, and harmony for gpt-oss) make tokens of each piece by
itself, and what users write is plain text to them.

One thread of vLLM's tokenizes everything, in the order in which it comes. So long texts are brought
to it one at a time, tenants in turns.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from vllm.exceptions import VLLMValidationError
from vllm.renderers.base import BaseRenderer
from vllm.renderers.cohere import CohereRenderer
from vllm.renderers.deepseek_v4 import DeepseekV4Renderer
from vllm.renderers.deepseek_v32 import DeepseekV32Renderer
from vllm.renderers.hf import HfRenderer
from vllm.renderers.registry import RENDERER_REGISTRY

from engines.host.control_tokens import ControlTokens
from engines.host.tenant_line import TenantLine, to_its_end
from engines.openai.tokenizing import MAX_CONTEXTS
from engines.vllm_plugin.identity import PAYER

LONG_CHARS: Final = 1 << 16  # takes some 20 ms
MAX_WAITING: Final = 4096  # requests; vLLM itself has no bound


class _Plain(BaseRenderer):
    """Marks what users spell before the prompt is written, and encodes marks as plain text."""

    def __init__(self, config: Any, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        self._controls = ControlTokens(tokenizer, template=self._template(tokenizer))
        self._line = TenantLine(MAX_WAITING)

    def _template(self, tokenizer: Any) -> str:
        """The text whose tokens with bars are control tokens; "": the tokenizer's own template."""
        return ""

    def render_messages(self, messages: list[Any], params: Any) -> Any:
        marked, by = self._marked(messages, params)
        conversation, prompt = super().render_messages(marked, by)
        return self._controls.unmarked(conversation), prompt

    async def render_messages_async(self, messages: list[Any], params: Any) -> Any:
        marked, by = self._marked(messages, params)
        conversation, prompt = await super().render_messages_async(marked, by)
        return self._controls.unmarked(conversation), prompt

    def _marked(self, messages: list[Any], params: Any) -> tuple[list[Any], Any]:
        given = [_opened(x) for x in messages]
        kwargs = self._controls.marked_value(params.chat_template_kwargs)
        return self._controls.marked(given), replace(params, chat_template_kwargs=kwargs)

    async def _tokenize_singleton_prompt_async(self, prompt: Any, params: Any) -> Any:
        text, tokenized = prompt.get("prompt"), super()._tokenize_singleton_prompt_async
        if not isinstance(text, str) or len(text) < LONG_CHARS or "prompt_token_ids" in prompt:
            return await tokenized(prompt, params)
        self._check_size(len(text) // self.get_tokenizer().max_chars_per_token)
        payer = PAYER.get()
        with self._line.place(payer):
            async with self._line.turn(payer, len(text)):
                written = await to_its_end(asyncio.ensure_future(tokenized(prompt, params)))
        self._check_size(len(written["prompt_token_ids"]))
        return written

    def _check_size(self, num_tokens: int) -> None:
        """Refuse what ``/tokenize`` would answer, however long; prompts vLLM bounds itself."""
        most = self.model_config.max_model_len
        if num_tokens > MAX_CONTEXTS * most:
            raise VLLMValidationError(
                f"This model's maximum context length is {most} tokens, and the text has"
                f" {num_tokens} tokens or more: send less of it.",
                parameter="prompt",
            )

    def _tokenize_prompt(self, prompt: Any, params: Any) -> Any:
        text = prompt["prompt"]
        if not self._controls.has_marks(text):
            return super()._tokenize_prompt(prompt, params)
        tokenizer = self.get_tokenizer()
        # A truncated prompt would lack tokens that are looked for; its length is checked later.
        options = {**params.get_encode_kwargs(), "truncation": False, "max_length": None}
        ids = self._controls.encode(text, lambda x: list(tokenizer(x, **options)["input_ids"]))
        return self._build_tokens_prompt(ids, {**prompt, "prompt": self._controls.unmarked(text)})


class _PlainByCode(_Plain):
    """Has no template but code: all that is added with bars is a control token."""

    def _template(self, tokenizer: Any) -> str:
        return " ".join(tokenizer.get_added_vocab())


class PlainRenderer(_Plain, HfRenderer):
    """Writes prompts by a chat template."""


class PlainCohere(_PlainByCode, CohereRenderer):
    """Writes Cohere's prompts."""


class PlainDeepseekV32(_PlainByCode, DeepseekV32Renderer):
    """Writes DeepSeek V3.2's prompts."""


class PlainDeepseekV4(_PlainByCode, DeepseekV4Renderer):
    """Writes DeepSeek V4's prompts."""


KINDS: Final[Mapping[str, type[_Plain]]] = {
    "hf": PlainRenderer,
    "kimi_audio": PlainRenderer,
    "cohere": PlainCohere,
    "deepseek_v32": PlainDeepseekV32,
    "deepseek_v4": PlainDeepseekV4,
    "deepseek_v41": PlainDeepseekV4,
}
# Users' text is plain in these, or there is none.
PLAIN_OF_THEMSELVES: Final = frozenset({"inkling", "kimi_k3", "mistral", "terratorch"})


def _opened(message: Any) -> Any:
    """Return a message whose calls have arguments without escapes, which would hide a spelling."""
    if not isinstance(message, Mapping) or not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call.get("function") or {})
        if isinstance(written := function.get("arguments"), str) and "\\" in written:
            with suppress(ValueError):  # no JSON: templates get it as it is
                function["arguments"] = json.dumps(json.loads(written), ensure_ascii=False)
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def register() -> None:
    """Have vLLM's server write prompts with them. Call it before the server begins."""
    for kind, renderer in KINDS.items():
        RENDERER_REGISTRY.register(kind, __name__, renderer.__name__)
