"""The HTTP face: OpenAI in, OpenAI out; knows sessions by id only."""
