"""The fake engine's process, for tests and demos: an engine's two sockets, without a model."""
