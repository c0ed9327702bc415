"""Stages and drawn numbers that several methods of the literature share."""
