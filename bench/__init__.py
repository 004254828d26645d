"""Benchmarks, one file per question asked; run as ``python -m bench.<name>``."""
