"""Finds the session of a request: the one that its client named, else the chat it continues.

The first of these that is there wins: the ``X-Session-ID`` header; the headers of agents
(``agents``); ``session_id`` and ``conversation`` in the body (``names``); the session in
``metadata.user_id``; else the longest message prefix that is known of the same tenant
(``known_chats``). So a client that sends only messages has sessions too. ``prompt_cache_key`` is no
identity but a group: chats are found within it.

Prompts that programs ask beside a conversation are told apart by their first words (``tasks``), and
have rows of their own.

``outline`` is a request as hashes of its parts, made once: chats are found by them, and a session's
requests compared.
"""
