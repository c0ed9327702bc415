"""Measures the served model in one rank: begins and ends a measurement, and joins in its steps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import vllm
from vllm.tokenizers import cached_tokenizer_from_config

from engines.calibration.self_measurement import OpenQuestions, SelfMeasurement
from engines.config import CalibrationOrder
from engines.vllm_plugin.blocks.paging import PagedCache
from engines.vllm_plugin.blocks.state_layers import StateBlocks
from engines.vllm_plugin.groups import Groups
from engines.vllm_plugin.measuring.exchange import EXCHANGE
from engines.vllm_plugin.measuring.forward_client import ForwardClient
from engines.vllm_plugin.measuring.serving_instrument import EngineKV, ServingInstrument
from engines.vllm_plugin.messages import Findings, ForwardDone
from engines.vllm_plugin.plan import StepWork
from engines.wire import CodecReport


class Prepared(NamedTuple):
    """The way in which a rank's share of the model is measured.

    ``order``: makes that of a model's first start. ``within``: fills the rank's paths into another.
    ``adopt``: see ``SelfMeasurement``.
    """

    order: Callable[[], CalibrationOrder]
    within: Callable[[CalibrationOrder], CalibrationOrder]
    groups: Groups
    fingerprint: str
    adopt: Callable[[], None]


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
        self._prepared: Prepared | None = None
        # The same on every rank, and unknown to clients.
        self._salt = hashlib.sha256(f"measuring {token}".encode()).hexdigest()

    def prepare(self, prepared: Prepared) -> None:
        """Set how this model is measured from now on."""
        self._prepared = prepared

    def open_instrument(self) -> ServingInstrument:
        """Open the instrument for the thread that calls. Raises what ``ServingInstrument`` does."""
        assert self._prepared is not None
        groups, states = self._prepared.groups, self._states
        kv = EngineKV(
            self._cache.layout,
            groups.layers,
            self._cache.block_tokens,
            states.layout if states is not None else None,
            tuple(x for y in groups.states if not y.recurrent for x in y.layers),
            self._cache.has_latents,
        )
        tokenizer = cached_tokenizer_from_config(self._config.model_config)
        known = (self._prepared.fingerprint, tokenizer, self._salt)
        return ServingInstrument(self._client, EXCHANGE, kv, *known)

    def begin(
        self, open_questions: OpenQuestions | None = None, order: CalibrationOrder | None = None
    ) -> None:
        """Begin a measurement, unless one runs already or measuring is impossible.

        Without ``open_questions`` the model is measured again. ``order``: see
        ``engines.wire.Measure``.
        """
        if self._prepared is None or self.is_running:
            return
        # They agree once, on the same presets, and do not continue to learn.
        several = self._config.parallel_config.world_size > 1
        if self._measurement is not None:
            self._measurement.close()
        self._client.begin()
        self._measurement = SelfMeasurement(
            self._prepared.order() if order is None else self._prepared.within(order),
            self.open_instrument,
            self._prepared.adopt,
            engine=f"vllm {vllm.__version__}",
            stages=order is None and not several,
            open_questions=open_questions,
            partners=self._client if several else None,
        )

    def begin_step(self, step: StepWork) -> None:
        """Start to observe layers in the step, if the order needs it."""
        EXCHANGE.begin_step(step)

    def fill(self, step: StepWork) -> None:
        """Fill the blocks of the step that are to get the prepared KV."""
        EXCHANGE.fill(step, self._cache, self._states)

    def receive(self, news: ForwardDone | Findings) -> None:
        """Pass the hub's news on to the thread that waits for it. On the link's thread."""
        self._client.receive(news)

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
