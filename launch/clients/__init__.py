"""Configures coding agents for a running server, in their own settings.

``table`` lists each client's settings, ``merging`` puts them into a file and keeps all others.
"""
