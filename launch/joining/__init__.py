"""Joining servers that share one Redis: ``invitation`` is what one hands to another in a file,
``acceptance`` what the other makes of it, ``roll_call`` who is there and whether they agree.
"""
