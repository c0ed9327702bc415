"""Packs the parts of a session besides rows: the matrices of recurrent layers.

``matrices`` is the arithmetic; ``session_codec`` combines it with the codecs of a model's rows.
"""
