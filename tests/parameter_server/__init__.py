"""Tests of the parameter server room."""
