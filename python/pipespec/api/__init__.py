"""The API: the contract of `generate()`."""
