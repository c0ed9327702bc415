"""Says whether the engine can measure the errors of codecs on its model. Does not import vLLM."""

from __future__ import annotations

from typing import Any, Final

from engines.vllm_plugin.groups import Groups

# What vLLM is started with for it, as import strings.
LOGITS_PROCESSOR: Final = "engines.vllm_plugin.measuring.forced_tokens:ForcedTokens"
WORKER_EXTENSION: Final = "engines.vllm_plugin.measuring.worker_extension.ModelView"

NO_SEAM: Final = (
    "vLLM was started without our logits processor and worker extension; add"
    f" --logits-processors {LOGITS_PROCESSOR} --worker-extension-cls {WORKER_EXTENSION}"
)
NO_TOKENIZER: Final = "vLLM was started without a tokenizer"


def unmeasurable(vllm_config: Any, groups: Groups) -> str:
    """Say why the engine cannot measure the errors of codecs on its model; "" if it can."""
    if vllm_config.model_config.skip_tokenizer_init:
        return NO_TOKENIZER
    processors = vllm_config.model_config.logits_processors or ()
    extension = vllm_config.parallel_config.worker_extension_cls
    if LOGITS_PROCESSOR not in processors or extension != WORKER_EXTENSION:
        return NO_SEAM
    return ""
