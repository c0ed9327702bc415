"""OpenAI's endpoints: chat and text completions, responses, embeddings, models, stored objects."""
