"""Finds the model that a request means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engines.base import HasMembers, LimitsTenants
from engines.openai.errors import unknown_model
from gateway.config import ANY_MODEL, GatewayConfig
from gateway.models.served_model import ServedModel


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
        """The one model, if there is one, and it is loaded for as long as the server runs."""
        return self.default if len(self) == 1 and self.default.on_demand is None else None

    def meant(self, asked: object, config: GatewayConfig) -> ServedModel:
        """Return the model that a body's ``model`` means.

        Where there is only one, it is that one for any name: ``served_name`` looks at the name
        once the body has been checked.

        Raises:
            InvalidRequest: 404, no model goes by that name.
        """
        if len(self._models) == 1 or not isinstance(asked, str):
            return self.default
        return self.named(asked, config)

    def named(self, asked: str, config: GatewayConfig) -> ServedModel:
        """Return the model of that name or alias.

        Raises:
            InvalidRequest: 404, no model goes by that name.
            EngineUnavailable: there is one model, whose engine has not said its name yet.
        """
        for model in self._models:
            if model.goes_by(asked):
                return model
        if asked in config.model_aliases or ANY_MODEL in config.model_aliases:
            return self.default
        raise unknown_model(asked[:100], *self.names())

    def engines(self) -> dict[str, LimitsTenants]:
        """Return all engines that can hold tenants to bytes, by name; each replica by itself."""
        found: dict[str, LimitsTenants] = {}
        for i, model in enumerate(self._models):
            engine: object = model.engine
            each = engine.members if isinstance(engine, HasMembers) else {"": engine}
            for name, x in each.items():
                if isinstance(x, LimitsTenants):
                    found[x.shared_address or f"{i}/{name}"] = x
        return found

    def names(self) -> list[str]:
        """List the models' names. Raises ``EngineUnavailable`` as ``ServedModel.name`` does."""
        return [x.name for x in self._models]
