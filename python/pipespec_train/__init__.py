"""Training of draft modules and draft heads: data, what is trained, trainer."""
