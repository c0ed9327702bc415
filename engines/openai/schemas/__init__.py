"""JSON schemas of answers and of calls: their bounds, and the keywords that no compiler knows."""
