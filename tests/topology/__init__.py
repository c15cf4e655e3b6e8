"""Tests of mpidist/topology."""
