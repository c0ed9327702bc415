"""The loaded model: weights, fingerprint, vocabulary (``loading``), ``ropes``, ``layer_calls``."""
