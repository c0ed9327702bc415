"""Which session a request belongs to: the one that its client named, else the chat it goes on.

The first of these that is there wins: the ``X-Session-ID`` header, ``session_id``,
``prompt_cache_key``, ``conversation``, ``previous_response_id`` (``names``); else the longest
message prefix that is known of the same tenant (``known_chats``). So a client that sends only
messages has sessions too.
"""
