"""Describes the HTTP API to its readers: programs and people."""
