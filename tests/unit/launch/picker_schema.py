"""JSON schema of ``EndpointPickerConfig``, ``llm-d.ai/v1alpha1``, as far as our values use it.

Source: the field tables of ``apix/config/v1alpha1`` and of the plug-ins' READMEs in llm-d-router.
"""

from __future__ import annotations

from typing import Any, Final


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


_TEXT: Final = {"type": "string", "minLength": 1}
_SECONDS: Final = {"type": "number", "exclusiveMinimum": 0}
_SESSION_SOURCE: Final = {
    **_object([], header=_TEXT, attribute=_TEXT),
    "minProperties": 1,
    "maxProperties": 1,
}
_PARAMETERS: Final = {
    "session-affinity-scorer": _object(
        [],
        strategy={"enum": ["encoded_endpoint_header", "session_id"]},
        profileName=_TEXT,
        encodedEndpointHeaderConfig=_object([], header=_TEXT),
        sessionIdConfig=_object(
            [],
            sources=_list(_SESSION_SOURCE),
            evictionTtlSeconds=_SECONDS,
            evictionSweepSeconds=_SECONDS,
        ),
    ),
    "core-metrics-extractor": _object(
        [],
        engineLabelKey=_TEXT,
        defaultEngine=_TEXT,
        engineConfigs=_list(
            _object(
                ["name"],
                name=_TEXT,
                queuedRequestsSpec=_TEXT,
                runningRequestsSpec=_TEXT,
                kvUsageSpec=_TEXT,
                loraSpec=_TEXT,
                cacheInfoSpec=_TEXT,
            )
        ),
    ),
}
_WITHOUT_PARAMETERS: Final = (
    "agent-identity",
    "kv-cache-utilization-scorer",
    "max-score-picker",
    "metrics-data-source",
    "prefix-cache-scorer",
    "queue-scorer",
    "single-profile-handler",
)
_PLUGIN: Final = {
    "oneOf": [
        _object(["type"], name=_TEXT, type={"enum": list(_WITHOUT_PARAMETERS)}),
        *(
            _object(["type"], name=_TEXT, type={"const": kind}, parameters=parameters)
            for kind, parameters in _PARAMETERS.items()
        ),
    ]
}
_REF: Final = _object(["pluginRef"], pluginRef=_TEXT)
_WEIGHED: Final = _object(["pluginRef"], pluginRef=_TEXT, weight={"type": "number"})

ENDPOINT_PICKER: Final = _object(
    ["apiVersion", "kind", "plugins", "schedulingProfiles"],
    apiVersion={"const": "llm-d.ai/v1alpha1"},
    kind={"const": "EndpointPickerConfig"},
    plugins=_list(_PLUGIN),
    schedulingProfiles=_list(_object(["name", "plugins"], name=_TEXT, plugins=_list(_WEIGHED))),
    dataLayer=_object(
        ["sources"], sources=_list(_object(["pluginRef"], pluginRef=_TEXT, extractors=_list(_REF)))
    ),
)
