"""Keeps what users and operators watch: requests, sessions, memory and quality.

``requests`` is the one account of a turn. ``live`` keeps these accounts and the past of sessions;
``snapshots`` is the part of it that one caller may see, at a moment, in the ``shape`` that
``docs/snapshot.md`` describes. Never the text of a chat.
``metrics`` and ``gauges`` are for Prometheus, ``telemetry`` has the log and traces, which ``otlp``
sends to a collector.
"""
