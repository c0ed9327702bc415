"""Layouts of staging memory between blocks and blob, and the copies in and out of it.

``staging_layout`` is the protocol of a layout, and ``layout_choice`` selects one for a blob:
``packed_layout`` for chunks that kernels pack, ``raw_layout`` for all other blobs. The segment of a
packed chunk is a ``row_segment`` for row formats, a ``rate_segment`` for calibrated fixed rates.
``kept_rows`` handles rows that no kernel packs.
"""
