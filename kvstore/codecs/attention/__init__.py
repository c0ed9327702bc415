"""Attends to packed rows as they are: products with queries, and weighted sums, without restoring.

``rotated`` defines both for the rotated rows of ``tq1`` to ``tq8`` in numpy; ``kernels`` has them
compiled. ``stacks`` has them for methods that are pipelines of linear stages.
"""
