"""Decides which codec may serve a model, by the bound and by the profile that was measured.

``served_codecs`` asks ``choice.choose`` when an engine starts and whenever something was measured;
the bound and the preference within it are in ``rules``. The choice is for packing: each blob
is read by the codec that its header names.
"""
