"""What lies in a staging region between blocks and blob, and how it gets in and out.

``staging_layout`` says what a layout promises, ``layout_choice`` which one a blob gets:
``row_layout`` for payloads of a row format, ``rate_layout`` for those of a calibrated fixed rate,
``raw_layout`` for all that has no kernels.
``kept_rows`` are rows that no kernel packs.
"""
