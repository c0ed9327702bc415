"""What is known of vLLM outside of it."""
