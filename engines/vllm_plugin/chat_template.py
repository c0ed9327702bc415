"""Finds out which orders of messages the chat template of vLLM's model takes."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from engines.host.template_rules import rules_of
from engines.wire import TemplateRules

logger = logging.getLogger("thermocline.vllm")


def template_rules(model_config: Any) -> TemplateRules:
    """Try the template of the model's own tokenizer, which EngineCore has loaded anyway.

    A template that was given to vLLM by ``--chat-template`` is known to its server only; then, and
    where there is no template, every order is taken to be fine.
    """
    try:
        from vllm.tokenizers import cached_tokenizer_from_config  # the rest runs without vLLM

        tokenizer = cached_tokenizer_from_config(model_config)
        apply = getattr(tokenizer, "apply_chat_template", None)
        if apply is None or not getattr(tokenizer, "chat_template", None):
            return TemplateRules()
        return rules_of(partial(apply, tokenize=False, add_generation_prompt=False))
    except Exception as error:  # a tokenizer of somebody else's making must not end the engine
        logger.warning("the chat template could not be tried: %s", error)
        return TemplateRules()
