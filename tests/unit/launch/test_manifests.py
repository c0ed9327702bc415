"""The Kubernetes manifests and the values for llm-d's router, as far as they can be judged here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from launch.settings.schema import Settings, resolve
from launch.settings.sources import Fields, from_environment
from tests.unit.launch.picker_schema import ENDPOINT_PICKER

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


def test_kubernetes_would_refuse_a_misspelled_field():
    (pods, _) = objects("llmd/pods.yaml")
    pods["spec"]["template"]["spec"]["containers"][0]["readinessprobe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pods, KUBERNETES, strict=True)


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


def test_the_picker_takes_its_configuration():
    config = picker()
    jsonschema.validate(config, ENDPOINT_PICKER)
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
