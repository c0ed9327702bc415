"""Starts, ends and reports on the measurements of the served model in one rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import vllm
from vllm.tokenizers import cached_tokenizer_from_config

from engines.calibration.measuring.trials import least_context
from engines.calibration.orders import first_order
from engines.calibration.self_measurement import OpenQuestions, SelfMeasurement
from engines.config import CalibrationOrder
from engines.vllm_plugin.blocks.paging import PagedCache
from engines.vllm_plugin.blocks.state_layers import StateBlocks
from engines.vllm_plugin.config import PluginSettings
from engines.vllm_plugin.groups import Groups
from engines.vllm_plugin.measuring.exchange import EXCHANGE
from engines.vllm_plugin.measuring.forward_client import ForwardClient
from engines.vllm_plugin.measuring.request_runner import unmeasurable
from engines.vllm_plugin.measuring.serving_instrument import ServingInstrument
from engines.vllm_plugin.messages import Findings, Forward, ForwardDone
from engines.wire import CodecReport


class RankMeasuring:
    """One rank's measurements. Methods may be called from any thread."""

    def __init__(
        self,
        settings: PluginSettings,
        vllm_config: Any,
        cache: PagedCache,
        states: StateBlocks | None,
        groups: Groups,
        fingerprint: str,
        *,
        send: Callable[[Forward | Findings], None],
        adopt: Callable[[], None],
    ) -> None:
        """``send``: sends to the hub. ``adopt``: see ``SelfMeasurement``."""
        self._settings = settings
        self._config = vllm_config
        self._rank = int(vllm_config.parallel_config.rank)
        self._cache = cache
        self._states = states
        self._groups = groups
        self._fingerprint = fingerprint
        self._client = ForwardClient(self._rank, send)
        self._adopt = adopt
        self._measurement: SelfMeasurement | None = None
        # The same on every rank, and unknown to clients.
        self._salt = hashlib.sha256(f"measuring {settings.token}".encode()).hexdigest()
        EXCHANGE.bind(cache, states)

    def open_instrument(self) -> ServingInstrument:
        """Return an instrument for the calling thread. Raises as ``ServingInstrument`` does."""
        tokenizer = cached_tokenizer_from_config(self._config.model_config)
        kept = self._cache, self._states, self._groups
        known = self._fingerprint, tokenizer, self._salt
        return ServingInstrument(self._client, EXCHANGE, *kept, *known)

    def begin(
        self, open_questions: OpenQuestions | None = None, order: CalibrationOrder | None = None
    ) -> None:
        """Begin a measurement, unless one runs already or measuring is impossible.

        Without ``open_questions`` the model is measured again. ``order``: see
        ``engines.wire.Measure``.
        """
        if unmeasurable(self._config) or self.is_running:
            return
        # Several ranks agree once, on the same presets, and do not continue to learn.
        several = self._config.parallel_config.world_size > 1
        if self._measurement is not None:
            self._measurement.close()
        self._client.begin()
        paths = self._settings.runtime_dir, str(self._settings.data_folder), self._rank
        self._measurement = SelfMeasurement(
            self._first_order() if order is None else order.within(*paths),
            self.open_instrument,
            self._adopt,
            engine=f"vllm {vllm.__version__}",
            stages=order is None and not several,
            open_questions=open_questions,
            partners=self._client if several else None,
        )

    def _first_order(self) -> CalibrationOrder:
        config, block_tokens = self._config.cache_config, self._cache.block_tokens
        longest = int(self._config.model_config.max_model_len)
        pool = (config.num_gpu_blocks or 0) * config.block_size
        # A state can be stored only after whole blocks, which may be hundreds of tokens long.
        layout = self._states.layout if self._states is not None else None
        return first_order(
            self._settings.store,
            min(longest, pool) if pool else longest,
            str(self._settings.data_folder),
            least_context(layout, block_tokens),
            block_tokens if layout is not None else 1,
        )

    def receive(self, news: ForwardDone | Findings) -> None:
        """Pass the hub's news on to the thread that waits for it."""
        self._client.receive(news)

    def with_progress(self, report: CodecReport) -> CodecReport:
        """Return the report with the measurement's progress or outcome filled in."""
        return self._measurement.with_progress(report) if self._measurement is not None else report

    @property
    def is_running(self) -> bool:
        """True while a measurement runs."""
        return self._measurement is not None and self._measurement.is_running

    @property
    def has_verdict(self) -> bool:
        """False only while a measurement runs that has no verdict yet."""
        return self._measurement is None or self._measurement.has_verdict or not self.is_running

    def close(self) -> None:
        """Interrupt the measurement."""
        if self._measurement is not None:
            self._measurement.close()
        self._client.close()
