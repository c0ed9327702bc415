"""All generated pages, and the function that writes each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from docs.generators.cli_page import cli_page
from docs.generators.conformance_page import conformance_page
from docs.generators.decisions_page import decisions_page
from docs.generators.errors_page import errors_page
from docs.generators.headers_page import headers_page
from docs.generators.metrics_page import table as metrics_page
from docs.generators.route_costs_page import route_costs_page
from docs.generators.settings_page import settings_page

DOCS = Path(__file__).parents[1]
PAGES: Final[Mapping[Path, Callable[[], str]]] = {
    DOCS / "reference" / "settings.md": settings_page,
    DOCS / "reference" / "cli.md": cli_page,
    DOCS / "reference" / "headers.md": headers_page,
    DOCS / "reference" / "errors.md": errors_page,
    DOCS / "reference" / "route-costs.md": route_costs_page,
    DOCS / "metrics.md": metrics_page,
    DOCS / "conformance.md": conformance_page,
    DOCS / "decisions" / "index.md": decisions_page,
}
