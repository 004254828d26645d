"""``pipespec bench``: the measurements of both papers, on any models.

:mod:`pipespec.bench.results` defines the folder that a run writes.
"""
