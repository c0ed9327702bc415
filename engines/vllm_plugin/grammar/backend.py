"""Compiles JSON schemas and patterns with llguidance, other grammars with xgrammar.

By default vLLM compiles all grammars with the compiler that the first grammar needed. xgrammar
takes up to two CPU seconds for a single ``maxLength``, and ignores keywords that it does not know
(``multipleOf``, ``not``). llguidance works lazily, only on the parts of a grammar that an answer
reaches, but does not support the tool calls of model families. So each compiler gets the grammars
that it handles well, through vLLM's interface for such compilers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import llguidance.hf
import llguidance.numpy as bitmasks
import xgrammar
from vllm.utils.mistral import is_mistral_tokenizer
from vllm.v1.structured_output.backend_guidance import GuidanceBackend, GuidanceGrammar
from vllm.v1.structured_output.backend_types import (
    StructuredOutputBackend,
    StructuredOutputGrammar,
    StructuredOutputOptions,
)
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from engines.host.grammar import FREE_MASK_S, MAX_MASKS_S
from engines.vllm_plugin.grammar.program import guided

_GUIDED: Final = {
    StructuredOutputOptions.JSON: "json",
    StructuredOutputOptions.JSON_OBJECT: "json",
    StructuredOutputOptions.REGEX: "regex",
}


class BoundedGrammar(GuidanceGrammar):
    """A grammar that ends its answer if its masks take too long: all answers wait for them."""

    masks_s = 0.0  # seconds beyond the free allowance of each mask

    def fill_bitmask(self, bitmask: Any, idx: int) -> None:
        begin = time.thread_time()
        bitmasks.fill_next_token_bitmask(self.ll_matcher, bitmask.numpy(), idx)
        self.masks_s += max(0.0, time.thread_time() - begin - FREE_MASK_S)
        self.check_error()

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return self.masks_s <= MAX_MASKS_S and bool(super().accept_tokens(request_id, tokens))


@dataclass
class TwoCompilers(StructuredOutputBackend):
    """Chooses between the compilers for each grammar.

    vLLM calls ``compile_grammar`` on worker threads, the other methods on its scheduler's thread.
    """

    def __post_init__(self) -> None:
        # Made at the start: it takes a second of Python, which would delay all requests later.
        self._tokenizer = _llguidance_tokenizer(self.tokenizer, self.vocab_size)

    @cached_property
    def _xgrammar(self) -> Any:
        return XgrammarBackend(self.vllm_config, self.tokenizer, self.vocab_size)

    def compile_grammar(
        self,
        request_type: StructuredOutputOptions,
        grammar_spec: str,
        stop_token_ids: set[int] | None = None,
    ) -> StructuredOutputGrammar:
        kind = _GUIDED.get(request_type)
        if kind is not None and self._tokenizer is not None:
            # vLLM passes an empty text if any JSON object is allowed.
            matcher = guided(self._tokenizer, kind, grammar_spec or '{"type": "object"}')
            if matcher is not None:
                return BoundedGrammar(matcher, self._tokenizer, self.vocab_size)
        return self._xgrammar.compile_grammar(request_type, grammar_spec, stop_token_ids)

    def allocate_token_bitmask(self, max_num_seqs: int) -> Any:
        known = self._tokenizer.vocab_size if self._tokenizer is not None else 0
        return xgrammar.allocate_token_bitmask(max_num_seqs, max(known, self.vocab_size))

    def destroy(self) -> None:
        """Do nothing: no resources are held outside the process."""


def _llguidance_tokenizer(tokenizer: Any, width: int) -> Any:
    """Return llguidance's form of a tokenizer; None if llguidance cannot read it."""
    if not GuidanceBackend.is_tokenizer_supported(tokenizer):
        return None
    if is_mistral_tokenizer(tokenizer):
        return tokenizer.llg_tokenizer
    return llguidance.hf.from_tokenizer(tokenizer, max(width, len(tokenizer)))


def choose_compilers(manager: Any) -> None:
    """Make vLLM's grammar manager use both compilers, unless the server's settings name one."""
    config = manager.vllm_config
    if config.structured_outputs_config.backend != "auto" or manager.backend is not None:
        return
    if not config.model_config.skip_tokenizer_init:
        width = config.model_config.get_vocab_size()
        manager.backend = TwoCompilers(config, manager.tokenizer, width)
