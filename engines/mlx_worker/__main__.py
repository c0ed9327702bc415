"""``python -m engines.mlx_worker``: the engine's process.

It reads its settings from standard input, serves on two sockets, and exits when its input ends.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Final

import msgspec
import uvicorn

from engines.config import WRONG_SETTINGS, WorkerConfig
from engines.host.control_server import ControlServer, private_socket
from engines.host.lifeline import Lifeline, make_sockets_folder, read_settings
from engines.host.template_rules import fill_in_of, rules_of
from engines.mlx_worker.cache.layout import CannotServe
from engines.mlx_worker.control import MlxVerbs, Notifier, SessionReports
from engines.mlx_worker.embeddings import Embedder
from engines.mlx_worker.http import create_app
from engines.mlx_worker.measurement import Measuring
from engines.mlx_worker.model.loading import LoadedModel, describe_device, load_model
from engines.mlx_worker.owner import Owner
from engines.mlx_worker.sessions.store_opening import store_opener
from engines.runtime_folder import held
from engines.wire import CodecReport, TemplateRules, Welcome

logger = logging.getLogger("engines.mlx_worker")

# Limit for saving at the end; less than the gateway waits for this process to exit.
FLUSH_S: Final = 20.0
# Errors of a machine that is short of files, disk space or memory; a restart may succeed.
_PASSING: Final = frozenset(
    {
        *(errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT),
        *(errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.EIO),
    }
)


def main() -> None:
    config = read_settings()
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    lifeline = Lifeline()
    try:
        with held(Path(config.runtime_dir), lifeline.gateway_died):
            asyncio.run(serve(config, lifeline))
    except CannotServe as error:  # something that the operator can change
        reason = " ".join(str(error).split())
        logger.error("%s cannot be served: %s", config.served_model_name, reason)
        raise SystemExit(WRONG_SETTINGS) from error
    except Exception as error:  # the process's edge: log the error and exit
        logger.exception("the engine ended with an unexpected error")
        raise SystemExit(1) from error


async def start(owner: Owner) -> None:
    """Start the owner thread.

    Raises:
        CannotServe: it cannot start until the operator changes something.
        OSError: the machine is short of files, disk space or memory; a restart may succeed.
    """
    try:
        await owner.start()
    except (OSError, ValueError) as error:
        if _may_pass(error):
            raise
        raise CannotServe(str(error)) from error


def _may_pass(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in _PASSING


def load(config: WorkerConfig) -> LoadedModel:
    """Load the model.

    Raises:
        CannotServe: it cannot be loaded; the message suggests a remedy.
        OSError: the machine is short of files, disk space or memory; a restart may succeed.
    """
    path = config.model_path
    try:
        return load_model(path, config.engine.dtype)
    except Exception as error:  # third-party files can break a loader in any way
        if _may_pass(error):
            raise
        if not Path(path).exists():
            raise CannotServe(
                f"{path} could not be fetched from the hub; check the name and the network, or"
                f" give --model a local folder ({error})"
            ) from error
        raise CannotServe(
            f"{path} cannot be loaded; is it complete, and of a kind that mlx_lm supports?"
            f" ({type(error).__name__}: {error})"
        ) from error


async def serve(config: WorkerConfig, lifeline: Lifeline) -> None:
    """Serve until standard input ends or SIGTERM comes; then save everything that is hot."""
    stop = lifeline.stop_event()
    folder = make_sockets_folder(config)
    owner = Owner(
        lambda: load(config),
        config.engine,
        config.served_model_name,
        store_opener(config.store, config.served_model_name, config.data_path),
    )
    logger.info("loading %s: %s", config.model_path, describe_device(config.engine))
    await start(owner)
    try:
        await _serve_until(stop, owner, config, folder)
    finally:
        await owner.close()
        if store := owner.store:
            if not await asyncio.to_thread(store.flush, FLUSH_S):
                logger.warning("not everything could be saved in %.0f s", FLUSH_S)
            await asyncio.to_thread(store.close)


async def _serve_until(
    stop: asyncio.Event, owner: Owner, config: WorkerConfig, folder: Path
) -> None:
    measuring = Measuring(owner, config)
    reports = SessionReports(owner, measuring.with_progress)
    verbs = MlxVerbs(owner, reports, measuring.begin_again)
    welcome = _welcome(owner, config, reports.codec(), measuring.possible)

    async def welcomed() -> Welcome:
        return msgspec.structs.replace(welcome, codec=reports.codec())

    control = ControlServer(config.token, welcomed, verbs)
    notifier = Notifier(reports, control.publish, verbs.pin_saved)
    owner.on_change = notifier.receive
    if store := owner.store:
        store.listen(verbs.store_changed)
        # Packing stored blobs again would distort the times that a measurement takes.
        store.pack_when(lambda: owner.is_quiet and measuring.has_verdict)
    http = _HttpServer(_http_config(owner, config))
    listener = _listener(folder / "http.sock")
    serving = asyncio.create_task(http.serve([listener]), name="http")
    notifying = asyncio.create_task(notifier.run(), name="notices")
    # Last, since all else must be ready once the gateway gets a welcome.
    control_socket = await control.serve(f"unix:{folder}/control.sock")
    facts = owner.facts
    logger.info("serving %s, context %d tokens", facts.name, facts.max_context)
    if not facts.hibernation:
        logger.warning("sessions of this model do not hibernate: %s", facts.hibernation_reason)
    measuring.begin()
    await _first(stop, owner.ended)
    died = owner.ended.is_set()
    await measuring.close()
    control_socket.close()
    control.close()
    http.should_exit = True
    await owner.close()  # ends the streams, for which the HTTP server waits
    await serving
    notifying.cancel()
    await asyncio.wait([notifying])
    if died:  # the gateway starts another process
        raise RuntimeError("the owner thread has ended")


async def _first(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers, since ``Lifeline`` handles SIGTERM."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


def _http_config(owner: Owner, config: WorkerConfig) -> uvicorn.Config:
    embedder = Embedder(owner, config.engine.prefill_step)
    return uvicorn.Config(
        create_app(owner, owner.loaded.tokenizer, config, embedder=embedder),
        log_config=None,
        access_log=False,
        # Longer than the gateway's idle limit, so that the gateway closes an idle connection.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
    )


def _listener(path: Path) -> socket.socket:
    """Return a listening unix socket for this user only; uvicorn's own would be open to all."""
    listener = private_socket(path)
    listener.listen(1024)
    listener.setblocking(False)
    return listener


def _welcome(owner: Owner, config: WorkerConfig, codec: CodecReport, can_measure: bool) -> Welcome:
    """Return the welcome with which the engine describes itself; ``codec`` is the current one."""
    facts, tokenizer, rules = owner.facts, owner.loaded.tokenizer, TemplateRules()
    if tokenizer.has_chat_template:
        render = tokenizer.apply_chat_template
        rules = rules_of(partial(render, tokenize=False, add_generation_prompt=False))
    live, bf16 = owner.plan.kv_sizes()
    return Welcome(
        engine="mlx",
        engine_version=f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')}",
        model=config.served_model_name,
        max_context=facts.max_context,
        codec=codec,
        hibernation=facts.hibernation,
        hibernation_reason=facts.hibernation_reason,
        template=rules,
        can_measure=can_measure,
        live_kv=live,
        bf16_kv=bf16,
        fill_in=fill_in_of(tokenizer.get_vocab()),
    )


if __name__ == "__main__":
    main()
