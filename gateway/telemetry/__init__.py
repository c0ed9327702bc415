"""Turns events into the data that operators' tools read: gauges of a moment, spans of turns."""
