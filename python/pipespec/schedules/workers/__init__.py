"""The driver that runs each draft in a process of its own."""
