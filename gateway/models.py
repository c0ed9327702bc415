"""The served models, each with its engine and its sessions; finds the one a request names."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import NamedTuple

from engines.base import (
    Engine,
    EngineError,
    EngineUnavailable,
    HasReplicas,
    LimitsTenants,
    SessionRef,
)
from engines.openai.errors import unknown_model
from engines.openai.messages import ImageSupport
from engines.pool.on_demand import LoadState, OnDemand
from engines.wire import Welcome
from gateway.config import ANY_MODEL, GatewayConfig
from gateway.identity.known_chats import MAX_KNOWN_CHATS, KnownChats
from gateway.identity.outline import PrefixWatch
from gateway.keys import Tenant
from gateway.watch.gauges import Gauges
from gateway.watch.live import Live
from gateway.watch.metrics import Metrics
from gateway.watch.snapshots import Snapshots
from scheduler.session import SessionView
from scheduler.sessions import SessionManager

ENGINE_POLL_S = 0.05
FIGURES_S = 0.5  # an engine that does not answer must not make /metrics wait longer
# A table of more rows is counted at most once in so many seconds, as all requests wait meanwhile.
MANY_ROWS, COUNT_EVERY_S = 10_000, 5.0
MAX_AWAITING = 256  # requests beyond these get 503 at once; each holds a connection


@dataclass(eq=False)
class ServedModel:
    """One model with its engine and its sessions; making it starts nothing."""

    engine: Engine
    sessions: SessionManager
    config: InitVar[GatewayConfig]
    metrics: InitVar[Metrics]
    _: KW_ONLY
    given_name: str = ""  # from the settings; "" = its engine names it, once it is ready
    aliases: Sequence[str] = ()  # further names, of this model only; a reload may change them
    path: str = ""  # the folder or hub id that its engine reads; "" = unknown
    weights_bytes: int | None = None  # on disk; None: not on this machine, or not looked for
    on_demand: OnDemand | None = None  # None: it is loaded for as long as the server runs

    def __post_init__(self, config: GatewayConfig, metrics: Metrics) -> None:
        self.chats = KnownChats(MAX_KNOWN_CHATS)
        self.prefixes = PrefixWatch()
        self.live = Live(self.engine, self.sessions, metrics)
        self.snapshots = Snapshots(self.live, name=self.given_name, loading=self._load_word)
        self.seen: Welcome | None = None  # its engine's, when a request last found that ready
        self._remote_images = config.remote_images
        self._num_awaiting = 0  # requests that wait for the engine to come back
        self._counted: Counter[tuple[str, str]] = Counter()  # sessions by state and tier
        self._counted_at = float("-inf")

    @property
    def served(self) -> Welcome:
        """The properties that the engine reported at its start.

        Raises:
            EngineUnavailable: the engine is not ready.
        """
        welcome = self.engine.welcome
        if welcome is None:
            raise EngineUnavailable(self.engine.trouble)
        return welcome

    @property
    def name(self) -> str:
        """The name that clients use for it.

        Raises:
            EngineUnavailable: the settings do not name it, and its engine is not ready.
        """
        return self.given_name or self.served.model

    @property
    def label(self) -> str:
        """Its name, for lists and logs; "" if its engine is to name it and is not ready."""
        welcome = self.engine.welcome
        return self.given_name or (welcome.model if welcome else "")

    @property
    def held_bytes(self) -> int:
        """The memory that its engine last reported, with the weights if the engine counts them."""
        report = self.live.report
        return max(report.active_bytes, report.hot_bytes) if report else 0

    def is_named(self, asked: str) -> bool:
        """Return whether ``asked`` is its name or one of its aliases. Raises as ``name`` does."""
        return asked == self.name or asked in self.aliases

    @property
    def image_support(self) -> ImageSupport:
        """The kinds of images that the engine takes. Raises as ``served`` does."""
        return ImageSupport(self.served.sees_images, self._remote_images)

    @property
    def last_image_support(self) -> ImageSupport:
        """The kinds of images that the engine took when last ready; all, if it never was."""
        return ImageSupport(self.seen is None or self.seen.sees_images, self._remote_images)

    @property
    def state(self) -> str:
        """A ``LoadState`` in a word; a model whose engine is not ready is "loading"."""
        if not self.is_there:
            return self._load_word()
        return "loaded" if self.engine.ready else "loading"

    def _load_word(self) -> str:
        """Return the ``LoadState`` of a model that is loaded on demand, else ""."""
        return str(self.on_demand.state.value) if self.on_demand else ""

    @property
    def is_there(self) -> bool:
        """True if it is loaded, or always is; a request for any other has it loaded first."""
        return self.on_demand is None or self.on_demand.state is LoadState.LOADED

    @property
    def trouble(self) -> str:
        """The reason why it takes no turns now, as a sentence.

        "" if it takes turns, or if a request would have it loaded.
        """
        if not self.is_there:
            return ""
        if not self.engine.ready:
            return self.engine.trouble
        if not self.sessions.settled:
            return "The engine has just started and is being asked for its sessions."
        return ""

    @property
    def is_listed(self) -> bool:
        """True once its engine has listed its sessions; on demand, after its first load."""
        return self.on_demand is None or self.on_demand.was_listed

    def may_have(self, session: SessionRef) -> bool:
        """Return whether the session is known, or its engine, not loaded yet, could have it."""
        return not self.is_listed or self.sessions.get(session) is not None

    def knows(self, tenant: Tenant, session_id: str) -> bool:
        """Return whether the tenant has a session of that id here."""
        return self.sessions.get(tenant.session(session_id)) is not None

    def coming_key(self, session_id: str) -> str:
        """Return the key under which ``KeyLimits`` counts a session that a request will open."""
        return f"{self.given_name}\0{session_id}"

    def sessions_of(self, tenant: Tenant) -> TenantSessions:
        """Return a view of a tenant's sessions, by their ids."""
        return TenantSessions(self, tenant)

    async def served_soon(self, wait_s: float, ending: Callable[[], bool]) -> Welcome:
        """Return ``served``, waiting up to ``wait_s`` for an engine that died and is restarted.

        An engine that has never been ready still reads its weights: a request is then refused at
        once.

        Args:
            ending: returns True once the server is shutting down.

        Raises:
            EngineUnavailable: the engine was never ready, or is not ready again in time.
        """
        if self.seen is not None and self._num_awaiting < MAX_AWAITING:
            self._num_awaiting += 1
            try:
                await self._wait_for_engine(wait_s, ending)
            finally:
                self._num_awaiting -= 1
        served = self.served
        self.seen = served
        return served

    async def _wait_for_engine(self, wait_s: float, ending: Callable[[], bool]) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        while not self.engine.ready and not ending() and loop.time() < until:
            await asyncio.sleep(ENGINE_POLL_S)

    async def gauges(self) -> Gauges:
        """Gather the current figures; ``engine`` is None if the engine does not answer."""
        try:
            async with asyncio.timeout(FIGURES_S):
                report = await self.engine.stats() if self.engine.ready else None
        except (EngineError, TimeoutError):
            report = None
        return Gauges(
            model=self.given_name,
            ready=self.engine.ready,
            num_running=self.sessions.num_running,
            num_waiting=self.sessions.num_waiting,
            engine=report,
            memory_available_bytes=self.sessions.headroom.available_bytes,
            sessions=self._count_sessions(),
            replicas=self._replicas(),
        )

    def _count_sessions(self) -> Counter[tuple[str, str]]:
        now = time.monotonic()
        if len(self.sessions.table) <= MANY_ROWS or now >= self._counted_at + COUNT_EVERY_S:
            self._counted = Counter((x.state.value, x.tier or "") for x in self.sessions.table)
            self._counted_at = now
        return self._counted

    def _replicas(self) -> dict[str, int]:
        if not isinstance(self.engine, HasReplicas):
            return {}
        ready = [x.ready for x in self.engine.replicas]
        return {"ready": ready.count(True), "away": ready.count(False)}


class TenantSessions(NamedTuple):
    """One tenant's sessions of a model. Implements ``identity.known_chats.SessionsSeen``."""

    model: ServedModel
    tenant: Tenant

    def _seen(self, id: str) -> SessionView | None:
        return self.model.sessions.get(self.tenant.session(id))

    def exists(self, id: str) -> bool:
        return self._seen(id) is not None

    def is_quiet(self, id: str) -> bool:
        seen = self._seen(id)
        return seen is not None and seen.state not in ("active", "waking")

    def tokens_of(self, id: str) -> int:
        seen = self._seen(id)
        return seen.tokens if seen else 0

    def is_answered(self, id: str) -> bool:
        answer_tokens = self.model.prefixes.answer_tokens(self.tenant.name, id)
        return (self.tokens_of(id) if answer_tokens is None else answer_tokens) > 0


class Models:
    """All models of one server, the default one first."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        """``models``: at least one. Requests that name none mean the first."""
        self._models = list(models)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    @property
    def default(self) -> ServedModel:
        """The model of requests that name none."""
        return self._models[0]

    @property
    def only(self) -> ServedModel | None:
        """The model, if it is the only one and always loaded; else None."""
        return self.default if len(self) == 1 and self.default.on_demand is None else None

    def meant(self, asked: object, config: GatewayConfig) -> ServedModel:
        """Return the model that ``asked``, the field ``model`` of a body, names.

        A server's only model is returned for any name; ``served_name`` checks the name later,
        after the body.

        Raises:
            InvalidRequest: 404, there are several models, and none has that name.
        """
        if len(self._models) == 1 or not isinstance(asked, str):
            return self.default
        return self.named(asked, config)

    def named(self, asked: str, config: GatewayConfig) -> ServedModel:
        """Return the model with that name or alias.

        Raises:
            InvalidRequest: 404, no model has that name.
            EngineUnavailable: a model's engine is to name it, and is not ready.
        """
        for model in self._models:
            if model.is_named(asked):
                return model
        if asked in config.model_aliases or ANY_MODEL in config.model_aliases:
            return self.default
        raise unknown_model(asked[:100], *self.names())

    def engines(self) -> dict[str, LimitsTenants]:
        """Return the engines that can limit the bytes of tenants, by name; replicas one by one."""
        found: dict[str, LimitsTenants] = {}
        for i, model in enumerate(self._models):
            engine: object = model.engine
            each = engine.members if isinstance(engine, HasReplicas) else {"": engine}
            found |= {f"{i}/{name}": x for name, x in each.items() if isinstance(x, LimitsTenants)}
        return found

    def names(self) -> list[str]:
        """List the models' names. Raises ``EngineUnavailable`` as ``ServedModel.name`` does."""
        return [x.name for x in self._models]
