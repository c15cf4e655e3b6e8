"""TensorFlow's tutorials on tf.distribute, the parts that are not Keras, retold block by block on mpidist."""
