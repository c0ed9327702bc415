"""The table of engines by name. A user's own engine is named as ``module:Attr``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Protocol, cast

from engines.base import Engine, EngineError
from engines.config import WorkerConfig

ENGINES: Mapping[str, str] = {
    "mlx": "engines.client.child_engine:MlxServer",
    "vllm": "engines.client.child_engine:VllmServer",
    "fake": "engines.client.child_engine:FakeServer",
    "attached": "engines.client.engine_client:AttachedEngine",
}


class UnknownEngine(Exception):
    """No engine can be made from this name; the message says why."""


class EngineFactory(Protocol):
    """Makes an engine of its settings."""

    def __call__(self, worker: WorkerConfig, env: Mapping[str, str] | None = None) -> Engine:
        """Make the engine; nothing is started yet.

        Args:
            env: added to our environment for a process that the engine starts.
        """


def create_engine(kind: str, worker: WorkerConfig, env: Mapping[str, str]) -> Engine:
    """Make the engine of a name in ``ENGINES``, or of an import string; nothing is started yet.

    Raises:
        UnknownEngine: no such name, module or attribute, or what it names makes no engine.
        EngineError: the settings are not for this engine.
    """
    factory = engine_factory(kind)
    try:
        engine: object = factory(worker, env)
    except EngineError:
        raise
    except Exception as error:  # third-party code, named by mistake perhaps
        if kind in ENGINES:
            raise
        raise UnknownEngine(f"engine {kind!r} makes no engine: {error}") from error
    if not isinstance(engine, Engine):
        raise UnknownEngine(f"engine {kind!r} makes a {type(engine).__name__}, which is no engine")
    return engine


def engine_factory(kind: str) -> EngineFactory:
    """Find the class for a name in ``ENGINES`` or for an import string.

    Raises:
        UnknownEngine: no such name, module or attribute.
    """
    target = ENGINES.get(kind, kind)
    module, colon, attribute = target.partition(":")
    if not (module and colon and attribute):
        known = ", ".join(sorted(ENGINES))
        raise UnknownEngine(f"no engine is called {kind!r}: use {known}, or module:Attr")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UnknownEngine(f"engine {kind!r} cannot be loaded: {error}") from error
    return cast(EngineFactory, factory)
