"""``docs/metrics.md``: the table of all metrics, made of the metrics themselves.

A test compares the file with this module's text.
"""

from __future__ import annotations

from collections.abc import Iterable

from engines.wire import CodecReport, EngineReport, TierStats
from gateway.watch.gauges import GaugeCollector, Gauges
from gateway.watch.metrics import DEFINED, Defined
from kvstore.codecs.quality import Quality

_HEAD = """# Metrics

For those who watch a server with Prometheus and Grafana: the metrics of `GET /metrics`, in
Prometheus' text format. `docs/grafana/thermocline.json` is a dashboard (in Grafana: Dashboards,
New, Import), and `docs/grafana/alerts.yml` has alert rules for Prometheus.

Names that begin with `gen_ai_` are OpenTelemetry's for generative AI (with their units, attributes
and buckets; dots become underscores); all others are Thermocline's own. No label holds a text that
a client chose: models have their served name, and sessions have no label.

Tokens of a stream are counted whether or not its client asks for them
(`stream_options.include_usage`). Of an answer that was broken off, about as many tokens are counted
as had been computed.

| metric | kind | labels | |
|---|---|---|---|
"""


def table() -> str:
    """Return the page."""
    rows = sorted([*DEFINED, *_gauges()])
    return _HEAD + "".join(map(_row, rows))


def names() -> set[str]:
    """Return every name under which a query may find something."""
    found = set()
    for each in [*DEFINED, *_gauges()]:
        suffixes = ("_bucket", "_sum", "_count") if each.kind == "histogram" else ("",)
        found |= {each.name + suffix for suffix in suffixes}
    return found


def _row(row: Defined) -> str:
    labels = " ".join(f"`{x}`" for x in row.labels)
    return f"| `{row.name}` | {row.kind} | {labels} | {row.words} |\n"


def _gauges() -> Iterable[Defined]:
    """Return the gauges of a server in which every part is present."""
    cost = Quality(
        preset="p",
        codec_id="p.1",
        context=1,
        bits_per_element=3.0,
        perplexity_change_pct=0.0,
        kl=0.0,
        top1=1.0,
        needle_found=0,
        needle_total=0,
        cos_k=1.0,
        cos_v=1.0,
        chain_kl=0.0,
        prefill_s=1.0,
        restore_s=1.0,
    )
    report = EngineReport(
        hot_bytes=1,
        idle_hot_bytes=1,
        hot_capacity_bytes=1,
        active_bytes=1,
        num_running=1,
        num_waiting=1,
        save_queue_bytes=1,
        tiers=[TierStats("ram", 1, 1, 1, 1, 1, True)],
        counters={"turns": 1},
        codec=CodecReport(name="p", id="p.1", rows=(cost,), max_kl=0.01),
    )
    gauges = Gauges(
        ready=True,
        num_running=1,
        num_waiting=1,
        engine=report,
        memory_available_bytes=1,
        sessions={("cold", "ram"): 1},
        replicas={"ready": 1},
    )
    for family in GaugeCollector(gauges).collect():
        suffix = "_total" if family.type == "counter" else ""
        labels = tuple(family.samples[0].labels)
        yield Defined(family.name + suffix, family.type, labels, family.documentation)
