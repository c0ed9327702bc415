"""Attends to packed rows without restoring them: products with queries, and weighted sums.

``rotated`` defines both in numpy for the rotated rows of ``tq1`` to ``tq8``; ``kernels`` has them
compiled, and ``session_rows`` attends to a whole session with them. ``planes`` has both for
methods that are pipelines of linear stages, and for those whose levels bit planes choose.
"""
