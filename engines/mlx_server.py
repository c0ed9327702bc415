"""mlx_lm behind the gateway: ``engines.mlx_worker`` in its own process."""

from __future__ import annotations

from engines.child import ChildEngine


class MlxServer(ChildEngine):
    module = "engines.mlx_worker"
