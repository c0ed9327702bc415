"""Serves ``GET /v1/events``: what happens, as server-sent events, to each caller its own part."""
