"""The version of the package, in the one place that setup.cfg and the package itself read."""

__version__ = "0.1.0.dev0"
