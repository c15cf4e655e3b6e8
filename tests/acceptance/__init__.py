"""Acceptance tests: the rules of the specification, written without knowledge of the implementation."""
