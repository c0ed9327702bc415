"""The present figures of engine, tiers, codec and sessions, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engines.wire import CodecReport, EngineReport

_OF_TIERS = (
    ("nbytes", "Bytes held."),
    ("capacity_bytes", "The tier's budget, bytes."),
    ("num_blobs", "Blobs held."),
    ("evictions", "Blobs evicted."),
    ("errors", "Failed operations."),
    ("available", "1 while the tier answers."),
)
_OF_CODECS = (
    ("kl", "KL of the next token, measured on this model, nats."),
    ("top1", "Measured share of positions with the same most likely token."),
    ("bits_per_element", "Measured bits for each value, everything counted."),
    ("chain_kl", "Measured KL at the answers to reasoning chains, nats."),
    ("restore_share", "Measured time to unpack, as a share of a prefill's."),
)


class Gauges(msgspec.Struct, frozen=True, kw_only=True):
    """The present figures of one model, gathered at each request for metrics.

    ``model`` becomes a label; "" if it is the only one.
    """

    ready: bool
    num_running: int
    num_waiting: int
    engine: EngineReport | None
    model: str = ""
    memory_available_bytes: int | None = None  # of the machine or container; None: not watched
    sessions: Mapping[tuple[str, str], int] = {}  # numbers, by state and fastest tier
    replicas: Mapping[str, int] = {}  # numbers, by state; {} if the model has one engine


class GaugeCollector:
    """A collector of prometheus_client for the ``Gauges`` of all models."""

    def __init__(self, *gauges: Gauges) -> None:
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for gauges in self._gauges:
            for family in _of_model(gauges):
                if gauges.model:
                    family.samples = [
                        x._replace(labels={**x.labels, "model": gauges.model})
                        for x in family.samples
                    ]
                if family.name in families:
                    families[family.name].samples += family.samples
                else:
                    families[family.name] = family
        yield from families.values()
        available = self._gauges[0].memory_available_bytes if self._gauges else None
        if available is not None:
            words = "Memory that is left on the machine, or within a container's limit."
            yield _gauge("memory_available_bytes", words, available)


def _of_model(gauges: Gauges) -> Iterator[Metric]:
    yield _gauge("engine_ready", "1 while the engine serves.", gauges.ready)
    if gauges.replicas:
        words = "Engines of one model, by state."
        yield _by("engine_replicas", words, "state", ((x, n) for x, n in gauges.replicas.items()))
    yield _gauge("turns_running", "Turns inside the engine.", gauges.num_running)
    yield _gauge("turns_waiting", "Turns in the waiting line.", gauges.num_waiting)
    words = "Sessions, by state and by the fastest tier with a copy; only cold ones sleep."
    yield _by("sessions", words, "state tier", ((*x, n) for x, n in gauges.sessions.items()))
    if gauges.engine is not None:
        yield from _of_engine(gauges.engine)


def _of_engine(report: EngineReport) -> Iterator[Metric]:
    yield _gauge("engine_hot_bytes", "Live KV, bytes.", report.hot_bytes)
    words = "Budget of live KV, bytes."
    yield _gauge("engine_hot_capacity_bytes", words, report.hot_capacity_bytes)
    words = "Live KV of idle sessions, bytes."
    yield _gauge("engine_idle_hot_bytes", words, report.idle_hot_bytes)
    if report.hot_capacity_bytes:
        used = (report.hot_bytes - report.idle_hot_bytes) / report.hot_capacity_bytes
        words = "Live KV that requests use, as a share of its budget: 0 to 1."
        yield _gauge("kv_usage_ratio", words, min(1.0, max(0.0, used)))
    if report.active_bytes:  # 0 for vLLM, whose workers are not asked
        words = "Tensor memory with weights, bytes."
        yield _gauge("engine_active_bytes", words, report.active_bytes)
    yield _gauge("engine_running", "Requests being served.", report.num_running)
    yield _gauge("engine_waiting", "Requests in the engine's own line.", report.num_waiting)
    words = "Hot KV that waits to be saved, bytes."
    yield _gauge("engine_save_queue_bytes", words, report.save_queue_bytes)
    events = CounterMetricFamily(
        "thermocline_engine_events", "The engine's counters.", labels=["event"]
    )
    for name, count in report.counters.items():
        events.add_metric([name], count)
    yield events
    for field, words in _OF_TIERS:
        name = f"tier_{field.replace('nbytes', 'bytes')}"
        yield _by(name, words, "tier", ((x.name, getattr(x, field)) for x in report.tiers))
    if report.codec is not None:
        yield from _of_codec(report.codec)


def _of_codec(codec: CodecReport) -> Iterator[Metric]:
    used = codec.id or codec.name
    yield _by("codec_info", "1 for the codec of new chunks.", "codec", [(used, 1)])
    words = "1 while no codec was measured on this model."
    yield _gauge("codec_unmeasured", words, codec.unmeasured)
    yield _gauge("codec_measuring", "1 while the model is being measured.", bool(codec.progress))
    words = "1 while the host packs a GPU's KV, which is slower."
    yield _gauge("codec_packed_by_host", words, bool(codec.why_host))
    if codec.max_kl is not None:
        words = "The largest KL that a codec may have, nats."
        yield _gauge("codec_bound_kl", words, codec.max_kl)
    for field, words in _OF_CODECS:
        rows = ((x.codec_id, str(x.context), getattr(x, field)) for x in codec.rows)
        yield _by(f"codec_{field}", words, "codec context", rows)


def _gauge(name: str, words: str, value: float) -> Metric:
    return GaugeMetricFamily(f"thermocline_{name}", words, value=float(value))


def _by(name: str, words: str, labels: str, rows: Iterable[tuple[Any, ...]]) -> Metric:
    """Return a gauge. Each row has the labels' values, then the gauge's; a None is left out."""
    gauge = GaugeMetricFamily(f"thermocline_{name}", words, labels=labels.split())
    for *names, value in rows:
        if value is not None:  # None: measured by an earlier release, or not timed
            gauge.add_metric(names, float(value))
    return gauge
