"""Speculative pipeline decoding: one target in n stages, one token in flight per stage, a draft beside them."""
