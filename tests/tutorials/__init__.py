"""TensorFlow's tutorials on tf.distribute, retold on mpidist: docs/tutorials, whose blocks are run, and parameter servers."""
