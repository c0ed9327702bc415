"""The process of the fake engine: an engine's two sockets and its manners, without a model."""
