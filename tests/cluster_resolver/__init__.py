"""Tests of mpidist/cluster_resolver."""
