"""Checks before any long work: models, devices, memory, and what each model can run as."""
