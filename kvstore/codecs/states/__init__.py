"""Packs what a session keeps besides rows: the matrices of recurrent layers.

``matrices`` is the arithmetic, ``session_codec`` joins it with the codecs of a model's rows.
"""
