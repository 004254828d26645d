"""The one place that holds the version: pyproject.toml, CMakeLists.txt and both packages read it from here."""

__version__ = "0.1.0"
