"""JSON schemas of answers and of calls: their bounds, and how they are written for a compiler.

``schema_count`` bounds them. ``keywords`` is a table: the form of each keyword's value, where it
has schemas, and which compilers hold it. ``enforceable`` writes a schema by that table, ``refs``
follows its refs, and ``held`` finds the schemas of a request and refuses strict ones.
"""
