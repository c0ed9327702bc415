"""Which failures end the worker for good, and which are worth another start."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable

import pytest

from engines.config import WRONG_SETTINGS, EngineConfig, WorkerConfig
from engines.host.lifeline import Lifeline
from engines.mlx_worker import __main__ as worker
from engines.mlx_worker.cache.layout import CannotServe
from engines.mlx_worker.model.loading import LoadedModel
from engines.mlx_worker.owner import Owner
from kvstore.config import StoreConfig

pytestmark = pytest.mark.mlx

TOY = {"model_path": "toy", "served_model_name": "toy", "runtime_dir": "", "token": "secret"}
CONFIG = WorkerConfig(engine=EngineConfig(), store=StoreConfig(), **TOY)


def raising(error: Exception) -> Callable[[], LoadedModel]:
    def load() -> LoadedModel:
        raise error

    return load


FINAL = [ValueError("hot_bytes"), PermissionError(errno.EACCES, "no")]
PASSING = [OSError(x, "no more") for x in (errno.EMFILE, errno.ENOSPC, errno.ENOMEM)]


@pytest.mark.parametrize("error", [*FINAL, *PASSING])
async def test_only_an_error_that_the_operator_has_to_mend_is_final(error: Exception):
    with pytest.raises(CannotServe if error in FINAL else type(error), match=re.escape(str(error))):
        await worker.start(Owner(raising(error), EngineConfig(), "toy"))


def test_a_loader_that_ran_out_of_files_has_not_judged_the_model(monkeypatch: pytest.MonkeyPatch):
    def load(path: str, dtype: str) -> LoadedModel:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(worker, "load_model", load)
    with pytest.raises(OSError, match="too many open files"):
        worker.load(CONFIG)


CODES = [(CannotServe("no such model"), WRONG_SETTINGS), (ValueError("a defect"), 1)]


@pytest.mark.parametrize(("error", "code"), [*CODES, (OSError(errno.EMFILE, "no more files"), 1)])
def test_the_exit_code_says_whether_to_start_again(error, code, monkeypatch):
    async def serve(config: WorkerConfig, lifeline: Lifeline) -> None:
        raise error

    monkeypatch.setattr(worker, "read_settings", lambda: CONFIG)
    monkeypatch.setattr(worker, "serve", serve)
    with pytest.raises(SystemExit) as ended:
        worker.main()
    assert ended.value.code == code
