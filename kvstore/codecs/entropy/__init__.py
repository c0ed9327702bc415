"""Integers to bytes in about as many bits as they are surprising: tables, rANS, and deflate."""
