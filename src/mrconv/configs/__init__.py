"""Experiments: one flat YAML each, every value in it."""
