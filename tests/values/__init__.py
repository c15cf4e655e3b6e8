"""Tests of the values room."""
