"""Reports to routers, by vLLM's own KV events, which blocks are stored packed, and where."""
