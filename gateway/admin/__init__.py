"""Serves whoever runs the server, under ``/admin``: keys, findings, the log, measuring."""
