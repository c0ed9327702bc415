"""The loaded model: loading, fingerprint, vocabulary, and the instrument that measures it."""
