"""Keeps what users and operators watch: requests, sessions, memory and quality.

``shape`` is the data that goes out, described in ``docs/snapshot.md``. ``live`` keeps account
of everything that happens; ``snapshots`` is the part of it that one caller may see, at a moment.
Never the text of a chat.
``metrics`` and ``gauges`` are for Prometheus, ``telemetry`` has the log and traces, which ``otlp``
sends to a collector.
"""
