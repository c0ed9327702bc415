"""The steps of every request: its id and log line, route, caller and charges, body, fit to the engine."""
