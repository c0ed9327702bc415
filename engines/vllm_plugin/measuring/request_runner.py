"""Submits measuring requests to vLLM in its HTTP server, and finds out whether it accepts any."""

from __future__ import annotations

import logging
from typing import Any, Final

from engines.http import PARAMS_FIELD
from engines.vllm_plugin.identity import TICKET_FIELD
from engines.vllm_plugin.messages import ForwardDone, RunForward

# The import strings of the two classes that vLLM must be started with to measure.
LOGITS_PROCESSOR: Final = "engines.vllm_plugin.measuring.model_access:ForcedTokens"
WORKER_EXTENSION: Final = "engines.vllm_plugin.measuring.model_access.ModelView"

NO_SEAM: Final = (
    "vLLM was started without our logits processor and worker extension; add"
    f" --logits-processors {LOGITS_PROCESSOR} --worker-extension-cls {WORKER_EXTENSION}"
)
NO_TOKENIZER: Final = "vLLM was started without a tokenizer"
logger = logging.getLogger("thermocline.vllm")
LEAST_PRIORITY: Final = 1 << 30  # if vLLM schedules by priority, all other requests go first
SCORED_FIELD: Final = "thermocline_scored"  # of a request's ``extra_args``
SHOW_MODEL: Final = "thermocline_show_model"  # the method of ``ModelView``


def unmeasurable(vllm_config: Any) -> str:
    """Return why the engine cannot measure the errors of codecs on its model; "" if it can."""
    if vllm_config.model_config.skip_tokenizer_init:
        return NO_TOKENIZER
    processors = vllm_config.model_config.logits_processors or ()
    extension = vllm_config.parallel_config.worker_extension_cls
    if LOGITS_PROCESSOR not in processors or extension != WORKER_EXTENSION:
        return NO_SEAM
    return ""


class RequestRunner:
    """Submits measuring requests, on the event loop of vLLM's HTTP server."""

    def __init__(self, client: Any) -> None:
        """``client``: vLLM's ``EngineClient``."""
        self._client = client
        self._shown = False

    async def run(self, run: RunForward) -> ForwardDone:
        """Run the request, wait for its end, and return the report."""
        try:
            if not self._shown:
                await self._client.collective_rpc(SHOW_MODEL)
                self._shown = True
            await self._generate(run)
        except Exception as error:  # the top level of a task: the caller must get the error
            logger.exception("a measuring request failed")
            return ForwardDone(run.order.number, f"{type(error).__name__}: {error}")
        return ForwardDone(run.order.number)

    async def _generate(self, run: RunForward) -> None:
        from vllm import SamplingParams

        order = run.order
        extra: dict[str, Any] = {"kv_transfer_params": {PARAMS_FIELD: {TICKET_FIELD: run.ticket}}}
        if order.scored:
            extra[SCORED_FIELD] = order.number
        params = SamplingParams(
            max_tokens=1,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            # With prompt_logprobs vLLM reads its prefix cache only if the request says so.
            prompt_logprobs=0 if order.scored else None,
            skip_reading_prefix_cache=False,
            extra_args=extra,
        )
        prompt: Any = {"prompt_token_ids": list(order.tokens), "cache_salt": order.salt}
        config = self._client.vllm_config.scheduler_config
        priority = LEAST_PRIORITY if config.policy == "priority" else 0
        answers = self._client.generate(
            prompt, params, f"measuring-{run.ticket}", priority=priority
        )
        async for answer in answers:
            reason = answer.outputs[0].finish_reason
        if reason != "length":
            raise RuntimeError(f"the request ended by {reason}")
