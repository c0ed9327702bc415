"""Whose KV it is, on what vLLM itself makes of a model's name; no engine is started."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own")

import huggingface_hub
import vllm
from vllm import EngineArgs
from vllm.config import CacheConfig, LoadConfig, ModelConfig, ParallelConfig
from vllm.transformers_utils.repo_utils import resolve_revision
from vllm.utils.argparse_utils import FlexibleArgumentParser

from engines.config import EngineConfig, WorkerConfig
from engines.vllm_plugin.process.command import command, is_cpu_build
from engines.vllm_plugin.worker.fingerprint import fingerprint, model_digest
from kvstore.config import StoreConfig
from tests.vllm.rig.tiny_model import write_tiny_model
from tests.vllm.rig.versions import make_arg_parser

pytestmark = pytest.mark.vllm
HUB_ID = "org/model"
COMMITS = "a" * 40, "b" * 40


def named(model: str, revision: str | None = None, weights: str = "") -> SimpleNamespace:
    """The fields of ``ModelConfig`` that are read."""
    return SimpleNamespace(model=model, revision=revision, model_weights=weights)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return made(tmp_path / "model")


def made(folder: Path, seed: int = 0) -> Path:
    folder.mkdir()
    return write_tiny_model(folder, seed)


def engine(folder: Path, load_format: str = "auto") -> SimpleNamespace:
    return SimpleNamespace(
        model_config=ModelConfig(str(folder), skip_tokenizer_init=True),
        parallel_config=ParallelConfig(),
        cache_config=CacheConfig(block_size=16),
        load_config=LoadConfig(load_format=load_format),
    )


@pytest.fixture
def branch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says which commit the hub's ``main`` is, without a hub."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    ref = tmp_path / "hub" / "models--org--model" / "refs" / "main"
    ref.parent.mkdir(parents=True)
    return ref


def digest_of(model: Any, folder: Path, load_format: str = "auto") -> str:
    return model_digest(model, load_format, folder / "remembered")


def test_a_branch_that_moves_on_is_another_model(branch, tmp_path):
    digests = []
    for commit in (*COMMITS, COMMITS[0]):
        branch.write_text(commit)
        revision = resolve_revision(HUB_ID)
        assert str(revision) == "main"
        digests.append(digest_of(named(HUB_ID, revision), tmp_path))
    assert digests[0] != digests[1]
    assert digests[0] == digests[2] == digest_of(named(HUB_ID, COMMITS[0]), tmp_path)


@pytest.mark.parametrize(
    ("config", "load_format"),
    [
        (named(HUB_ID), "auto"),  # the commit is unknown: another hub, or one out of reach
        (named(HUB_ID, "main"), "auto"),
        (named(HUB_ID, "v1.0"), "auto"),
        (named("written", weights="s3://bucket/model"), "auto"),
        (named("written"), "tensorizer"),
        (named("written"), "somebodys_own"),
        (named("empty"), "auto"),
    ],
)
def test_weights_that_cannot_be_looked_at_have_a_new_name_at_every_start(
    config, load_format, tmp_path
):
    made(tmp_path / "written")
    (tmp_path / "empty").mkdir()
    if config.model != HUB_ID:
        config = named(str(tmp_path / config.model), weights=config.model_weights)
    assert digest_of(config, tmp_path, load_format) != digest_of(config, tmp_path, load_format)


@pytest.mark.parametrize("num_files", [1, 2])
def test_a_model_in_files_counts_with_the_content_of_all_of_them(num_files, tmp_path):
    files = [tmp_path / f"model[q4]-0000{i}-of-0000{num_files}.gguf" for i in (1, 2)][:num_files]
    digests = []
    for content in (b"one", b"two", b"one"):
        files[0].write_bytes(b"same")
        files[-1].write_bytes(content)
        digests.append(digest_of(named(str(files[0])), tmp_path))
    assert digests[0] == digests[2] != digests[1]


def test_a_folder_counts_with_every_byte_and_with_its_code(model, tmp_path):
    first = digest_of(named(str(model)), tmp_path)
    assert first == digest_of(named(str(model)), tmp_path)
    (model / "modeling_own.py").write_text("x = 1")
    assert digest_of(named(str(model)), tmp_path) != first


def test_the_whole_of_it_on_vllms_own_objects(model, tmp_path):
    """Made-up weights are other weights than those of the folder."""
    other = made(tmp_path / "other", seed=1)
    found = [
        fingerprint(engine(*args), 0, tmp_path / "remembered")
        for args in [(model,), (model,), (model, "dummy"), (other,)]
    ]
    assert found[0] == found[1]
    assert len(set(found)) == 3


def test_another_release_of_vllm_is_another_model(model, tmp_path, monkeypatch):
    """It may compute KV, or lay it out, in another way."""
    before = fingerprint(engine(model), 0, tmp_path / "remembered")
    monkeypatch.setattr(vllm, "__version__", f"{vllm.__version__}.post1")
    assert fingerprint(engine(model), 0, tmp_path / "remembered") != before


@pytest.mark.parametrize(
    "changed",
    [
        {"model_config": {"dtype": "float16"}},
        {"cache_config": {"block_size": 32}},
        {"parallel_config": {"tensor_parallel_size": 2}},
    ],
    ids=["dtype", "block size", "ranks"],
)
def test_another_dtype_block_size_or_number_of_ranks_is_another_model(model, tmp_path, changed):
    """On the objects that vLLM makes of its options, one of them changed."""
    plain, other = engine(model), engine(model)
    for name, options in changed.items():
        if name == "model_config":
            made = ModelConfig(str(model), skip_tokenizer_init=True, **options)
        else:
            made = type(getattr(plain, name))(**options)
        setattr(other, name, made)
    names = [fingerprint(x, 0, tmp_path / "remembered") for x in (plain, other, engine(model))]
    assert names[0] == names[2] != names[1]


def test_each_rank_is_a_model_of_its_own(model, tmp_path):
    ranks = [fingerprint(engine(model), rank, tmp_path / "remembered") for rank in range(3)]
    assert len(set(ranks)) == 3


def test_an_engine_that_only_measures_is_the_one_that_serves(model, tmp_path):
    """Context, budget and store are its own; the command is the same."""
    found = []
    for engine, store in [
        (EngineConfig(hot_bytes=1 << 30), StoreConfig(codec="auto")),
        (EngineConfig(hot_bytes=1 << 26, max_context=1536), StoreConfig(codec="raw", disk_bytes=0)),
    ]:
        worker = WorkerConfig(
            engine=engine,
            store=store,
            model_path=str(model),
            served_model_name="tiny",
            runtime_dir="/nowhere",
            token="x",
        )
        _, _, _, *argv = command(worker, Path("/nowhere"), cpu=is_cpu_build())
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(
            [*argv, "--skip-tokenizer-init"]
        )
        config = EngineArgs.from_cli_args(args).create_engine_config()
        found.append(fingerprint(config, 0, tmp_path / "remembered"))
    assert found[0] == found[1]
