"""The engine's end of the control connection: verbs, reports and notices."""
