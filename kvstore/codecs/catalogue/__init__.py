"""The table of all codecs: names, bits, sentences, papers, and import strings of their code.

Nothing heavy is imported here; ``names`` reads the table.
"""
