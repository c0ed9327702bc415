"""Thermocline on Ray Serve: replicas of vLLM that keep sessions.

    from ray import serve
    from ray.serve.llm import LLMConfig
    import thermocline.ray

    config = LLMConfig(model_loading_config={"model_id": "qwen", "model_source": "Qwen/Qwen3-8B"})
    store = {"secret_file": "/etc/thermocline/secret", "redis_url": "redis://10.0.0.5:6379/0"}
    serve.run(thermocline.ray.app({"llm_config": config, "store": store}))

A Serve configuration file can name ``app``, too (``import_path: thermocline.ray:app``). The
gateway gets the list of replicas from Serve's address, which is its setting
``engine.replica_list``; docs/scale.md has the full example.

``with_sessions(config, store)`` returns a copy of an ``LLMConfig`` with our connector, and
``application`` makes a Serve application of such a copy, with ``ThermoclineServer`` as server
class. ``by_waiting_and_heat`` is the autoscaling policy.

Needs the extra ``ray`` and vLLM: bash launch/install.sh ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from engines.on_ray.application import app as app
    from engines.on_ray.application import application as application
    from engines.on_ray.application import with_sessions as with_sessions
    from engines.on_ray.scaling import by_waiting_and_heat as by_waiting_and_heat
    from engines.on_ray.server import ThermoclineServer as ThermoclineServer

NAMES: Final = {
    "ThermoclineServer": "engines.on_ray.server",
    "app": "engines.on_ray.application",
    "application": "engines.on_ray.application",
    "by_waiting_and_heat": "engines.on_ray.scaling",
    "with_sessions": "engines.on_ray.application",
}


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module 'thermocline.ray' has no attribute {name!r}")
    return getattr(importlib.import_module(NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *NAMES])
