"""Entropy coding of integers into about their information content: static tables and rANS."""
