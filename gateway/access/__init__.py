"""Keeps what only admins touch in a running server: the list of API keys, the log's last lines."""
