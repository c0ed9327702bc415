"""OpenAI's request schema and error shape, shared by the gateway and the engines.

``requests`` has the fields of chat and text completions and their checks, ``messages`` what a chat
is made of (messages, tools, formats), ``tokenizing`` the questions for a prompt's tokens,
``errors`` the one shape of every error.
"""
