"""One stage's work: model, cache, forward, sampling; n-gram index, draft heads, controller, tensor-parallel groups."""
