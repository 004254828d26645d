"""Trains the bundled model family and its draft module: ``python -m tools.demo_family.train --out DIR``."""
