"""Reports to routers, by vLLM's own KV events, which blocks rest packed, and where."""
