"""One stage's work: model, cache, forward, sampling."""
