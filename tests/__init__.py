"""Tests of mpidist; the folders mirror those of the package."""
