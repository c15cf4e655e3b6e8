"""Tests of the types that a user's program sees."""
