"""The fake engine's process: an engine's two sockets and its behaviour, without a model."""
