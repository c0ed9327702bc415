"""Finds the session of a request: the one that its client named, else the chat it continues.

The first that is present wins: the ``X-Session-ID`` header; the headers of agents; in the body
``session_id``, ``conversation`` and the session in ``metadata.user_id`` (all in ``names``); else
the longest known message prefix of the same tenant (``known_chats``). So a client that sends only
messages has sessions too. ``prompt_cache_key`` identifies no session, but a group of chats, within
which a chat is searched.

Prompts that programs send beside a conversation (titles, tags) are recognised by their first words,
and have sessions of their own.

``outline`` hashes the parts of a request once; the hashes serve to find a chat, and to compare the
requests of a session.
"""
