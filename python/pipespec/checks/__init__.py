"""Checks before any long work: models, devices, memory, and the ways in which each model can run."""
