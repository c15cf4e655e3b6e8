"""The version of the package, read by setup.cfg and the package itself."""

__version__ = "0.1.0"
