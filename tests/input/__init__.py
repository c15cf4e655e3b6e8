"""Tests of the input room."""
