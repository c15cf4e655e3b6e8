"""Figures about the source of the library: ``python -m tests.house``, for one checkout or several side by side."""
