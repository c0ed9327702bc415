"""The loaded model: weights, fingerprint and vocabulary (``loading``), ``ropes``, layers' calls."""
