"""One protocol, its clients, and the islands that run inside an engine's own process."""
