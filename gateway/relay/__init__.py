"""Serves one turn: waits for a slot, asks the engine, and passes its answer on to the client."""
