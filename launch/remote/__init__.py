"""Speaks to a running server as its clients do: an address, a streamed turn, events."""
