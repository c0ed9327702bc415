"""The benchmarks that need vLLM, plain or with our plug-in (``bash launch/install.sh vllm``)."""
