"""Clients that talk to a running server: what each needs, and its own file of settings."""
