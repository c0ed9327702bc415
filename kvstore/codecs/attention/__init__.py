"""Attends to packed rows without restoring them: products with queries, and weighted sums.

``rotated`` defines both in numpy for the rotated rows of ``tq1`` to ``tq8``; ``kernels`` has them
compiled. ``stacks`` has them for methods that are pipelines of linear stages.
"""
