"""Tests of the cross_device_ops room."""
