"""Experiments, one flat YAML file each, their variants, and sweeps."""
