"""Requests find their sessions."""
