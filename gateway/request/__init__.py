"""The steps of every request: id and log line, route, caller, charges, body, fit to its engine."""
