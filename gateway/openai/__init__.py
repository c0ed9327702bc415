"""OpenAI's endpoints: chat and text completions, responses, and other uses of a model."""
