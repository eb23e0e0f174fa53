"""Generators for the synthetic tasks of Long Range Arena."""
