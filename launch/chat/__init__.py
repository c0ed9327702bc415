"""Chats with a server from a terminal, and shows the state of its sessions meanwhile.

``talk.py`` is one conversation, ``screen.py`` the output, ``program.py`` the loop with the commands
that begin with a slash.
"""
