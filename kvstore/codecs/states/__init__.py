"""Packs the parts of a session besides rows: the matrices of recurrent layers.

``matrices`` is the arithmetic; ``codecs/session_codec`` combines it with the codecs of rows.
"""
