"""Serves the server's operators: ``/admin``, and the paths that say how the server is."""
