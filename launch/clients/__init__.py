"""Configures coding agents for a running server, in their own settings.

``table`` says what each client needs, ``merging`` puts it into a file without losing what is there.
"""
