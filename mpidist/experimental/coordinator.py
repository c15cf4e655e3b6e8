"""The names of ``tf.distribute.experimental.coordinator``, which are those of ``mpidist.coordinator``."""

from mpidist.coordinator import *  # noqa: F403
from mpidist.coordinator import __all__ as __all__
