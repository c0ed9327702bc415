"""Ray has the interface that we use, and takes the configuration that we make of a user's."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
import yaml
from ray.llm._internal.common.callbacks.base import CallbackBase, CallbackCtx
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
from ray.serve.config import AutoscalingConfig, AutoscalingContext
from ray.serve.context import ReplicaContext
from ray.serve.llm import LLMConfig, LLMServer
from ray.serve.schema import ReplicaRank, ServeDeploySchema

import thermocline.ray
from engines.on_ray.application import MIDDLEWARE, POLICY
from engines.on_ray.scaling import by_waiting_and_heat

ROOT = Path(__file__).parents[2]
CPU = {"accelerator_config": {"kind": "cpu"}}


@pytest.fixture
def secret(tmp_path: Path) -> str:
    (tmp_path / "secret").write_bytes(b"s" * 32)
    return str(tmp_path / "secret")


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A model's folder, of which Ray reads the configuration."""
    folder = tmp_path / "model"
    folder.mkdir()
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 99}
    content = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes}
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder)


Config = Callable[..., LLMConfig]


@pytest.fixture
def config(model: str) -> Config:
    def make(**changes: object) -> LLMConfig:
        loading = {"model_id": "m", "model_source": model}
        return LLMConfig(model_loading_config=loading, **{**CPU, **changes})

    return make


def test_the_release_is_the_one_that_was_tried():
    assert ray.__version__.startswith("2.60.")


def test_the_server_class_is_as_we_extend_it():
    assert inspect.iscoroutinefunction(LLMServer.__init__)
    assert "llm_config" in inspect.signature(LLMServer.__init__).parameters
    for name in ("start", "check_health", "__del__"):
        assert inspect.iscoroutinefunction(getattr(LLMServer, name)), name
    assert inspect.iscoroutinefunction(VLLMEngine.build_asgi_app)
    ours = thermocline.ray.ThermoclineServer
    assert issubclass(ours, LLMServer)


def test_what_we_read_of_serve_is_there():
    assert {"rank", "app_name", "replica_tag"} <= set(dir(ReplicaContext)) | set(
        ReplicaContext.__dataclass_fields__
    )
    assert "local_rank" in ReplicaRank.model_fields
    for name in ("aggregated_metrics", "target_num_replicas"):
        assert (
            name in dir(AutoscalingContext)
            or name in inspect.signature(AutoscalingContext).parameters
        )
    assert "run_init_node" in CallbackCtx.__dataclass_fields__
    assert inspect.iscoroutinefunction(CallbackBase.on_before_node_init)


def test_a_configuration_gets_our_connector_and_keeps_the_rest(secret, config):
    given = config(engine_kwargs={"max_num_seqs": 4, "middleware": ["a.b"], "dtype": "bfloat16"})
    adapted = thermocline.ray.with_sessions(given, {"secret_file": secret, "ram_bytes": 5})
    assert "kv_transfer_config" not in given.engine_kwargs
    engine = adapted.engine_kwargs
    assert engine["kv_transfer_config"]["kv_connector"] == "ThermoclineConnector"
    assert engine["middleware"] == ["a.b", MIDDLEWARE]
    assert (engine["max_num_seqs"], engine["dtype"], engine["block_size"]) == (4, "bfloat16", 32)
    known = adapted.get_engine_config()  # raises for arguments that vLLM does not have
    assert known.get_initialization_kwargs()["served_model_name"] == ["m"]
    assert adapted.server_cls is thermocline.ray.ThermoclineServer
    assert adapted.deployment_config["num_replicas"] == 1


def test_autoscaling_goes_by_our_policy_unless_another_is_named(secret, config):
    store = {"secret_file": secret}
    bounds = {"min_replicas": 1, "max_replicas": 3}
    adapted = thermocline.ray.with_sessions(
        config(deployment_config={"autoscaling_config": bounds}), store
    )
    scaling = AutoscalingConfig.model_validate(adapted.deployment_config["autoscaling_config"])
    assert scaling.policy.policy_function == POLICY
    assert scaling.policy.get_policy().__name__ == by_waiting_and_heat.__name__
    other = {**bounds, "policy": {"policy_function": "math:floor"}}
    adapted = thermocline.ray.with_sessions(
        config(deployment_config={"autoscaling_config": other}), store
    )
    assert adapted.deployment_config["autoscaling_config"] == other


@pytest.mark.parametrize(
    ("changes", "store", "words"),
    [
        ({}, {"secret_file": ""}, "secret_file is missing"),
        ({}, {"ram": 5}, "unknown field `ram`"),
        ({"engine_kwargs": {"kv_transfer_config": {"kv_connector": "Nixl"}}}, None, "leave it out"),
        ({"engine_kwargs": {"enable_prefix_caching": False}}, None, "enable_prefix_caching"),
    ],
)
def test_wrong_settings_are_refused_at_once(changes, store, words, secret, config):
    with pytest.raises(ValueError, match=words):
        thermocline.ray.with_sessions(config(**changes), store or {"secret_file": secret})
    with pytest.raises(ValueError, match="must be given"):
        thermocline.ray.app({"model": "m"})


@pytest.mark.parametrize("name", ["serve.yaml", "kuberay.yaml"])
def test_the_configurations_that_we_ship_are_rays(name, secret, model):
    first = next(yaml.safe_load_all((ROOT / "engines/on_ray" / name).read_text()))
    if name == "kuberay.yaml":
        assert first["spec"]["rayClusterConfig"]["rayVersion"] == ray.__version__
        first = yaml.safe_load(first["spec"]["serveConfigV2"])
    (application,) = ServeDeploySchema.model_validate(first).applications
    assert application.import_path == "thermocline.ray:app"
    args = application.args
    args["store"]["secret_file"] = secret
    args["llm_config"]["model_loading_config"]["model_source"] = model
    config = LLMConfig.model_validate(args["llm_config"])
    adapted = thermocline.ray.with_sessions(config, args["store"])
    assert adapted.get_engine_config().get_initialization_kwargs()["served_model_name"] == ["qwen"]
    assert adapted.deployment_config["autoscaling_config"]["policy"] == {"policy_function": POLICY}
