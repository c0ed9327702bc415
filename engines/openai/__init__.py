"""OpenAI's request schema and error shape, shared by the gateway and the engines.

``requests`` has the fields and checks of chat and text completions, embeddings and tokenization;
``messages`` has the parts of a chat (messages, images, tools, formats). ``json_bodies`` parses a
body and checks it against such fields. ``errors`` has the shape of every error.
"""
