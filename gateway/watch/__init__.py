"""Records requests, sessions, memory and quality for users and operators.

``requests`` has the record of one request while it is served. ``live`` keeps these records and the
history of sessions. ``snapshots`` returns the part that one caller may see, in the ``shape`` that
``docs/snapshot.md`` describes; never the text of a chat. ``metrics`` and ``gauges`` are for
Prometheus, ``telemetry`` has the log and traces, which ``otlp`` sends to a collector.
"""
