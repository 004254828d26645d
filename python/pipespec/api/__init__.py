"""The API: the contract of ``generate()``, ``attach()``, the server, reports and traces."""
