"""Commands that look at a running server from outside: ``bench``, ``chat`` and ``top``."""
