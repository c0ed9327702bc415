"""Measures the served model in one rank: begins and ends a measurement, and joins in its steps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import vllm
from vllm.tokenizers import cached_tokenizer_from_config

from engines.calibration.agreement import ALONE
from engines.calibration.messages import CalibrationOrder
from engines.calibration.self_measurement import SelfMeasurement, Wanted
from engines.calibration.sharing.sharing import NO_SHARING, Sharing
from engines.vllm_plugin.blocks.paging import PagedCache
from engines.vllm_plugin.blocks.state_layers import StateBlocks
from engines.vllm_plugin.groups import Groups
from engines.vllm_plugin.measuring.exchange import EXCHANGE
from engines.vllm_plugin.measuring.forward_client import ForwardClient
from engines.vllm_plugin.measuring.serving_instrument import EngineKV, ServingInstrument
from engines.vllm_plugin.messages import ForwardDone, JointFindings
from engines.vllm_plugin.plan import StepWork
from engines.wire import CodecReport


def longest_prompt(vllm_config: Any) -> int:
    """The most tokens of one request: bounded by the model's context and the pool of blocks."""
    cache = vllm_config.cache_config
    longest = int(vllm_config.model_config.max_model_len)
    pool = (cache.num_gpu_blocks or 0) * cache.block_size
    return min(longest, pool) if pool else longest


class RankMeasuring:
    """One rank's part in measuring requests. Methods with a ``step`` run on vLLM's thread."""

    def __init__(
        self,
        vllm_config: Any,
        cache: PagedCache,
        states: StateBlocks | None,
        client: ForwardClient,
        token: str,
    ) -> None:
        """``token``: the secret of the engine's settings."""
        self._config = vllm_config
        self._cache = cache
        self._states = states
        self._client = client
        self._measurement: SelfMeasurement | None = None
        self._open: Callable[[Wanted, Sharing], SelfMeasurement] | None = None
        self._sharing: Sharing = NO_SHARING
        # The same on every rank, and unknown to clients.
        self._salt = hashlib.sha256(f"measuring {token}".encode()).hexdigest()

    def prepare(
        self,
        order: Callable[[], CalibrationOrder],
        groups: Groups,
        fingerprint: str,
        adopt: Callable[[], None],
        sharing: Sharing = NO_SHARING,
    ) -> None:
        """Set how this model is measured from now on: see ``SelfMeasurement``.

        ``sharing`` is owned by this object.
        """
        self._sharing = sharing

        def opened() -> ServingInstrument:
            return ServingInstrument(
                self._client,
                EXCHANGE,
                EngineKV(
                    self._cache.layout,
                    groups.layers,
                    self._cache.block_tokens,
                    self._states.layout if self._states is not None else None,
                    tuple(x for y in groups.states if not y.recurrent for x in y.layers),
                    self._cache.has_latents,
                ),
                fingerprint,
                cached_tokenizer_from_config(self._config.model_config),
                self._salt,
            )

        # One rank may have kept results of an interrupted measurement that another rank lacks.
        several = self._config.parallel_config.world_size > 1

        def begun(wanted: Wanted, sharing: Sharing) -> SelfMeasurement:
            return SelfMeasurement(
                order(),
                opened,
                adopt,
                engine=f"vllm {vllm.__version__}",
                resumes=not several,
                wanted=wanted,
                partners=self._client if several else ALONE,
                sharing=sharing,
            )

        self._open = begun

    def begin(self, wanted: Wanted | None = None) -> None:
        """Begin a measurement, unless one runs already or measuring is impossible.

        Without ``wanted`` the model is measured again, and no other engine is asked. Several ranks
        do not continue to learn: every rank would need to have kept the same presets.
        """
        if self._open is None or self.is_running:
            return
        sharing = NO_SHARING if wanted is None else self._sharing
        self._measurement = self._open(wanted or Wanted(), sharing)

    def begin_step(self, step: StepWork) -> None:
        """Start to observe layers in the step, if the order needs it."""
        EXCHANGE.begin_step(step)

    def fill(self, step: StepWork) -> None:
        """Fill the blocks of the step that are to get the prepared KV."""
        EXCHANGE.fill(step, self._cache, self._states)

    def hear(self, news: ForwardDone | JointFindings) -> None:
        """Pass the hub's news on to the thread that waits for it. On the link's thread."""
        self._client.hear(news)

    def with_progress(self, report: CodecReport) -> CodecReport:
        """Return the report with the progress and the end of the measurement filled in."""
        return self._measurement.with_progress(report) if self._measurement is not None else report

    def read(self, step: StepWork) -> list[int]:
        """Read the wanted blocks of the step; return the jobs that are done."""
        return EXCHANGE.read(step, self._cache, self._states)

    @property
    def is_running(self) -> bool:
        """True while a measurement runs. Any thread."""
        return self._measurement is not None and self._measurement.is_running

    @property
    def has_verdict(self) -> bool:
        """False only while a measurement runs that has no verdict yet. Any thread."""
        return self._measurement is None or self._measurement.has_verdict or not self.is_running

    def close(self) -> None:
        """Interrupt the measurement."""
        if self._measurement is not None:
            self._measurement.close()
        self._client.close()
        self._sharing.close()
