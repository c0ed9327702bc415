"""Layouts of staging memory between blocks and blob, and the copies in and out of it.

``staging_layout`` says what a layout promises, ``layout_choice`` which one a blob gets:
``row_layout`` for payloads of a row format, ``rate_layout`` for those of a calibrated fixed rate,
``raw_layout`` for all that has no kernels.
``kept_rows`` are rows that no kernel packs.
"""
