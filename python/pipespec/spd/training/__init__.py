"""Training of draft modules: data, mask, trainer."""
