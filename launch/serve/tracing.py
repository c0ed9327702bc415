"""Sends spans of turns to an OpenTelemetry collector, if one is set."""

from __future__ import annotations

from importlib.metadata import version

from gateway.config import GatewayConfig
from gateway.telemetry.tracing import PassOn, Tracing
from launch.errors import UsageError


def tracing_of(config: GatewayConfig) -> Tracing:
    """Make what traces turns. Raises ``UsageError``: its packages are not installed."""
    if not config.otlp_endpoint:
        return PassOn()
    try:
        from gateway.telemetry.otlp import OtlpTracing
    except ImportError as error:
        raise UsageError(
            "gateway.otlp_endpoint needs OpenTelemetry's packages: pip install 'thermocline[otlp]'"
        ) from error
    return OtlpTracing(config.otlp_endpoint, version("thermocline"))
