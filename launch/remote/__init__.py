"""Clients of a running server: its address, one turn, its sessions, a chat, and ``top``."""
