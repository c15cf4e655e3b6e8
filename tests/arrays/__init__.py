"""Tests of mpidist.arrays."""
