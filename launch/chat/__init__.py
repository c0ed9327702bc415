"""Chats with a server from a terminal, and shows the state of its sessions meanwhile.

``talk.py`` is one conversation, ``commands.py`` the commands with a slash, ``screen.py`` the
output, ``program.py`` the loop.
"""
