"""A running server, seen from the terminal: its address, a turn, its sessions, a chat, ``top``."""
