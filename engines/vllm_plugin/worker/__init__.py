"""One rank's cold store in each of vLLM's workers, and its copies between blocks and blobs."""
