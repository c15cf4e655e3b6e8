"""Keras models under strategies; run once for each of Keras' backends, by KERAS_BACKEND."""
