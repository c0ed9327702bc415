"""Makes the greeting of an engine to the gateway, which describes the chats that it accepts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from engines.host.template_rules import fill_in_of, rules_of
from engines.vllm_plugin.config import PluginSettings
from engines.vllm_plugin.measuring.request_runner import unmeasurable
from engines.wire import CodecReport, FillIn, TemplateRules, Welcome

logger = logging.getLogger("thermocline.vllm")
T = TypeVar("T")


def welcome_of(settings: PluginSettings, vllm_config: Any, version: str) -> Welcome:
    """The greeting without what the workers know: the codec and the sizes of KV."""
    model = vllm_config.model_config
    return Welcome(
        engine="vllm",
        engine_version=version,
        model=settings.served_model_name or str(model.model),
        max_context=int(model.max_model_len),
        codec=CodecReport(name=""),
        hibernation=True,
        template=_of_tokenizer(model, _rules) or TemplateRules(),
        can_measure=not unmeasurable(vllm_config),
        sees_images=sees_images(model),
        fill_in=_of_tokenizer(model, _fill_in),
    )


def sees_images(model_config: Any) -> bool:
    """Return whether the model accepts images and vLLM's configuration allows them."""
    if not getattr(model_config, "supports_multimodal_inputs", False):
        return False
    try:
        from vllm.multimodal import MULTIMODAL_REGISTRY  # the rest runs without vLLM

        kinds = MULTIMODAL_REGISTRY.get_processing_info(model_config).supported_mm_limits
        limit = model_config.get_multimodal_config().get_limit_per_prompt("image")
    except Exception as error:  # a third-party model must not end the engine
        logger.warning("it is unknown whether the model accepts images: %s", error)
        return False
    return "image" in kinds and limit > 0


def _of_tokenizer(model_config: Any, read: Callable[[Any], T]) -> T | None:
    """Read from the model's own tokenizer, which EngineCore has loaded; None if that fails."""
    try:
        from vllm.tokenizers import cached_tokenizer_from_config  # the rest runs without vLLM

        tokenizer = cached_tokenizer_from_config(model_config)
        return read(tokenizer) if tokenizer else None
    except Exception as error:  # a third-party tokenizer must not end the engine
        logger.warning("the tokenizer's chat template or vocabulary cannot be read: %s", error)
        return None


def _fill_in(tokenizer: Any) -> FillIn | None:
    """The marks for fill-in-the-middle."""
    return fill_in_of(tokenizer.get_vocab())


def _rules(tokenizer: Any) -> TemplateRules:
    """The orders of roles that the chat template accepts.

    Only vLLM's server knows a template that was set by ``--chat-template``. In that case, and where
    there is no template, every order is assumed to be accepted.
    """
    apply = getattr(tokenizer, "apply_chat_template", None)
    if apply is None or not getattr(tokenizer, "chat_template", None):
        return TemplateRules()
    return rules_of(partial(apply, tokenize=False, add_generation_prompt=False))
