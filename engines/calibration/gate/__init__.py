"""Decides which codec may serve a model, by the bound and by the profile that was measured."""
