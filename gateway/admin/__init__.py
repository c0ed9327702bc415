"""The routes for operators: ``/admin``, and those for health checks, metrics and the version."""
