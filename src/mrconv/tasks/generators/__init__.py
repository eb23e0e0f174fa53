"""Generators of the synthetic tasks of Long Range Arena."""
