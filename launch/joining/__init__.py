"""Has a server share a Redis, and its sessions, with others.

``invitation`` is the file that one server hands to another, ``acceptance`` makes settings of it,
``roll_call`` says who is there and whether they agree.
"""
