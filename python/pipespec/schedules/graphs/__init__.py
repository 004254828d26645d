"""Drivers whose steps need no host, so that they can be captured as CUDA graphs.

``driver`` runs calls; ``rounds`` and ``streams`` say which steps form a graph. ``stage`` and ``buffers`` are what a graph is captured over, ``capture``
captures it, ``scheduling`` runs it. ``head`` is the stage of a draft head, ``attention`` the attention that the models borrow.
"""
