"""Entropy coding: integers as about the bits that they carry, by static tables, rANS or deflate."""
