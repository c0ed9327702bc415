"""Layouts of staging memory between blocks and blob, and the copies in and out of it.

``staging_layout`` is the protocol of a layout, and ``layout_choice`` selects one for a blob:
``row_layout`` for payloads of a row format, ``rate_layout`` for those of a calibrated fixed rate,
``raw_layout`` for all blobs without kernels.
``kept_rows`` handles rows that no kernel packs.
"""
