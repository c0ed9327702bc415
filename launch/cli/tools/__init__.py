"""Commands that look at running servers from outside: ``bench``, ``chat``, ``join``, ``top``."""
