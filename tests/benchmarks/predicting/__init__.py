"""Tests of predictions."""
