"""The table of all codecs: names, bits, sentences, papers, and import strings of their code.

Imports nothing heavy; ``names`` reads the table.
"""
