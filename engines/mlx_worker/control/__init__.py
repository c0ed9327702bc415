"""The engine's end of the control connection: verbs, reports, notices; begins measurements."""
