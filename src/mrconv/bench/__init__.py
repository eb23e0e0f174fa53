"""Benchmarks: contestants, timing and recording, for `mrconv bench` and the scripts in benchmarks/."""
