"""Serves the server's operators, under ``/admin``: keys, findings, the log, measuring."""
