"""OpenAI's endpoints: chat and text completions, and the list of models."""
