"""Drivers: several ways to run the stages of a chain over one protocol. :mod:`pipespec.registry` lists them."""
