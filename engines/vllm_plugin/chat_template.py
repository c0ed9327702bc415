"""Finds out which chats vLLM's model accepts: the order of roles, images, fill-in marks."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from engines.host.template_rules import fill_in_of, rules_of
from engines.wire import FillIn, TemplateRules

logger = logging.getLogger("thermocline.vllm")


def sees_images(model_config: Any) -> bool:
    """Say whether the model accepts images and vLLM's configuration allows them."""
    if not getattr(model_config, "supports_multimodal_inputs", False):
        return False
    try:
        from vllm.multimodal import MULTIMODAL_REGISTRY  # the rest runs without vLLM

        kinds = MULTIMODAL_REGISTRY.get_processing_info(model_config).supported_mm_limits
        limit = model_config.get_multimodal_config().get_limit_per_prompt("image")
    except Exception as error:  # a third-party model must not end the engine
        logger.warning("whether the model sees images is not known: %s", error)
        return False
    return "image" in kinds and limit > 0


def fill_in(model_config: Any) -> FillIn | None:
    """Return the tokenizer's marks for fill-in-the-middle; None if it has none."""
    try:
        from vllm.tokenizers import cached_tokenizer_from_config  # the rest runs without vLLM

        tokenizer = cached_tokenizer_from_config(model_config)
        return fill_in_of(tokenizer.get_vocab()) if tokenizer else None
    except Exception as error:  # a third-party tokenizer must not end the engine
        logger.warning("the tokenizer's vocabulary could not be read: %s", error)
        return None


def template_rules(model_config: Any) -> TemplateRules:
    """Try the template of the model's own tokenizer, which EngineCore has loaded in any case.

    Only vLLM's server knows a template that was set by ``--chat-template``. In that case, and where
    there is no template, every order of roles is assumed to be accepted.
    """
    try:
        from vllm.tokenizers import cached_tokenizer_from_config  # the rest runs without vLLM

        tokenizer = cached_tokenizer_from_config(model_config)
        apply = getattr(tokenizer, "apply_chat_template", None)
        if apply is None or not getattr(tokenizer, "chat_template", None):
            return TemplateRules()
        return rules_of(partial(apply, tokenize=False, add_generation_prompt=False))
    except Exception as error:  # a third-party tokenizer must not end the engine
        logger.warning("the chat template could not be tried: %s", error)
        return TemplateRules()
