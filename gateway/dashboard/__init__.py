"""Serves the dashboard at /ui: one static page that reads the public API like any other client."""
