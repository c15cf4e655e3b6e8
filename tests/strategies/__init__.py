"""Tests of the strategies room."""
