"""The benchmarks that need vLLM, plain or with the plug-in (``bash launch/install.sh vllm``)."""
