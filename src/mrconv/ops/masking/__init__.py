"""Sequences of different lengths in one batch."""
