"""Real clients against a running server: agents as their packages install them, and SDKs."""
