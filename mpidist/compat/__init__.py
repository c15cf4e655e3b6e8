"""Older forms of TensorFlow's that programs still use, and refusals that name alternatives."""
