"""Profiles of models that engines of one secret publish for each other on their Redis, sealed.

``publication`` describes a published profile and its names; ``shelf`` writes it to the server and
reads it from there.
"""
