"""Profiles of models that engines of one secret publish for each other on their Redis, sealed.

``publication`` says what is published and how it is named; ``shelf`` puts it on the server, and
takes it from there.
"""
