"""Finds the session of a request: the one that its client named, else the chat it continues.

The first that is present wins: the ``X-Session-ID`` header; the headers of agents; in the body
``session_id``, ``conversation`` and the session in ``metadata.user_id`` (all in ``names``); else
the longest message prefix that is known of the same tenant (``known_chats``). So a client that
sends only messages has sessions too. ``prompt_cache_key`` is no identity but a group: chats are
found within it.

Prompts that programs send beside a conversation are recognised by their first words, and have
rows of their own.

``outline`` is a request as hashes of its parts, made once: chats are found by them, and a session's
requests compared.
"""
