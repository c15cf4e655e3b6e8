"""Acceptance tests: the rules of the programming model, written without knowledge of the implementation."""
