"""Turns what happens into what tools of operators read: gauges of a moment, spans of turns."""
