"""OpenAI's request schema and error shape, shared by the gateway and the engines.

``requests`` has the fields of chat and text completions, of questions for a prompt's tokens, and
their checks, ``messages`` what a chat is made of (messages, images, tools, formats),
``json_bodies`` reads a body and checks it against such fields, ``errors`` has the one shape of
every error.
"""
