"""Has a server share a Redis, and its sessions, with others.

``invitation`` is what one server hands to another in a file, ``acceptance`` what the other makes of
it, ``roll_call`` says who is there and whether they agree.
"""
