"""Keeps what users and operators watch: requests, sessions, memory and quality, as they change.

``shape`` is the data that goes out, described in ``docs/events.md``. ``live`` hears of everything
that happens; ``scope`` is the part of it that one caller may see. Never the text of a chat.
``metrics`` and ``gauges`` are for Prometheus, ``telemetry`` has the log and traces, which ``otlp``
sends to a collector.
"""
