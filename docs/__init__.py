"""The product's words; what of them is written by programs comes out of ``docs.generators``."""
