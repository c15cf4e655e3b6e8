"""Figures of how the library is built: ``python -m tests.house``, of this checkout or of others, side by side."""
