"""Drafts that read the target's hidden states: EAGLE-3 heads."""
