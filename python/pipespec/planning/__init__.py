"""Planning: closed forms, the perf model, measured step times, and drafts that are made here.

``closed_form``, ``perf_model`` and ``steps`` need numpy and the native core only. ``measure`` and ``drafts`` run models and need torch.
"""
