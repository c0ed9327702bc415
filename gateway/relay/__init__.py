"""Serves one turn: a slot, then the engine's answer, then its bytes on to the client."""
