"""TensorFlow's tutorials on tf.distribute, retold: the documents of docs/tutorials are run, block by block."""
