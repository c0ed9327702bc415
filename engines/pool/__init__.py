"""Several engines behind one gateway: the replicas of a model, and models loaded on demand."""
