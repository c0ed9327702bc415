"""Joins what servers and replicas share: the directory, keys' limits, lists of replicas."""
