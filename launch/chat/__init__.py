"""Chats with a server from a terminal, and shows what its sessions do meanwhile.

``talk.py`` is one conversation, ``commands.py`` what begins with a slash, ``screen.py`` what is
seen, ``program.py`` the loop.
"""
