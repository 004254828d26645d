"""Planning: the analytical model, the simulator, measured step times, and drafts that are made here.

``closed_form``, ``simulator`` and ``steps`` need numpy and the native core only. ``measure`` and ``drafts`` run models and need torch.
"""
