"""Benchmarks: candidates, timing and records, for `mrconv bench` and the scripts in benchmarks/."""
