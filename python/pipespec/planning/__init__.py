"""Planning: the analytical model, the simulator, the profile of a chain, and the choice of a schedule.

``closed_form``, ``simulator``, ``profile`` and ``planner`` need numpy and the native core only. ``measure``, ``profile_store`` and ``auto``
run models and need torch.
"""
