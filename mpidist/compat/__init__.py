"""Older forms of TensorFlow's, which programs still have, and refusals that say what to use instead."""
