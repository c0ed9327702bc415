"""How KV is encoded. One method per file; ``presets`` is the table of names."""
