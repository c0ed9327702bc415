"""The Kubernetes manifests and the values for llm-d's router, as far as they can be judged here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from launch.settings.schema import Settings, resolve
from launch.settings.sources import Fields, from_environment

ROOT = Path(__file__).parents[3] / "launch"
MANIFESTS = ("llmd/pods.yaml", "../engines/on_ray/kuberay.yaml")
KUBERNETES = "1.34"


def objects(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / name).read_text()))


def of_kubernetes() -> list[Any]:
    return [
        pytest.param(each, id=f"{name}-{each['kind']}")
        for name in MANIFESTS
        for each in objects(name)
        if not each["apiVersion"].startswith("ray.io/")
    ]


@pytest.mark.parametrize("manifest", of_kubernetes())
def test_kubernetes_takes_each_object(manifest):
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_variables_of_their_pods_are_settings(name):
    templates = [x["spec"]["template"]["spec"] for x in objects(name) if "template" in x["spec"]]
    containers = [x for template in templates for x in template["containers"]]
    assert containers
    for container in containers:
        given = {x["name"]: x["value"] for x in container["env"]}
        resolve([from_environment(Fields(Settings), given)])


# ---- llm-d's router


def values() -> dict[str, Any]:
    return objects("llmd/values.yaml")[0]["router"]


def picker() -> dict[str, Any]:
    epp = values()["epp"]
    return yaml.safe_load(epp["pluginsCustomConfig"][epp["pluginsConfigFile"]])


# Plug-ins and fields of ``EndpointPickerConfig``, as far as our values use them: from the field
# tables of ``apix/config/v1alpha1`` and of the plug-ins' READMEs in llm-d-router.
PLUGINS = """
agent-identity core-metrics-extractor kv-cache-utilization-scorer max-score-picker
metrics-data-source prefix-cache-scorer queue-scorer session-affinity-scorer single-profile-handler
"""
FIELDS = """
apiVersion kind plugins schedulingProfiles dataLayer sources extractors pluginRef name type weight
parameters strategy sessionIdConfig header attribute evictionTtlSeconds defaultEngine engineConfigs
queuedRequestsSpec runningRequestsSpec kvUsageSpec
"""


def fields_of(config: Any) -> set[str]:
    inner = config.values() if isinstance(config, dict) else config
    own = set(config) if isinstance(config, dict) else set[str]()
    return own.union(*(fields_of(x) for x in inner if isinstance(x, dict | list)))


def test_the_picker_takes_its_configuration():
    config = picker()
    assert config["apiVersion"] == "llm-d.ai/v1alpha1"
    assert config["kind"] == "EndpointPickerConfig"
    assert fields_of(config) <= set(FIELDS.split())
    assert {x["type"] for x in config["plugins"]} <= set(PLUGINS.split())
    names = {x.get("name", x["type"]) for x in config["plugins"]}
    profiles = [x["pluginRef"] for y in config["schedulingProfiles"] for x in y["plugins"]]
    sources = config["dataLayer"]["sources"]
    extractors = [x["pluginRef"] for y in sources for x in y["extractors"]]
    assert {*profiles, *extractors, *(x["pluginRef"] for x in sources)} <= names


def test_the_router_finds_our_pods_and_their_ports():
    (pods, service) = objects("llmd/pods.yaml")
    template = pods["spec"]["template"]
    labels, (port,) = template["metadata"]["labels"], template["spec"]["containers"][0]["ports"]
    wanted = values()["modelServers"]
    assert wanted["matchLabels"].items() <= labels.items()
    assert wanted["targetPorts"] == [{"number": port["containerPort"]}]
    (engine,) = _extractor()["engineConfigs"]
    assert engine["name"] == labels["llm-d.ai/engine-type"] == _extractor()["defaultEngine"]
    assert service["metadata"]["name"] == pods["spec"]["serviceName"]


def test_the_gauges_that_the_picker_reads_are_documented():
    (engine,) = _extractor()["engineConfigs"]
    table = (ROOT.parent / "docs" / "metrics.md").read_text()
    for spec in ("queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec"):
        assert f"`{engine[spec]}`" in table


def _extractor() -> dict[str, Any]:
    found = [x for x in picker()["plugins"] if x["type"] == "core-metrics-extractor"]
    return found[0]["parameters"]
