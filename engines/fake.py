"""An engine without a model: deterministic text, real processes, real sockets.

It lets the gateway and the scheduler be tried, tested and measured where no model is at hand
(``--engine fake``). What it answers, and how it can be told to fail, stands in
``engines.fake_worker.script``.
"""

from __future__ import annotations

from engines.child import ChildEngine


class FakeServer(ChildEngine):
    module = "engines.fake_worker"
