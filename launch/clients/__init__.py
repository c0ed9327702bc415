"""What coding agents need to talk to a running server, and how it gets into their own settings.

``table`` says what each client needs, ``merging`` puts it into a file without losing what is there.
"""
