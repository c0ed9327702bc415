"""Cold sessions inside vLLM, by its own plug-in interfaces only. Runs in vLLM's processes."""
