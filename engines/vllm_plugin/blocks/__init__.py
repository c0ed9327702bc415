"""vLLM's paged KV as rows: the layout of pages, and the code that reads and fills blocks.

``Blocks`` (in ``blocks``) is the protocol; ``host_blocks`` implements it on the host,
``stateful_blocks`` for models with layers that do not keep all tokens, and ``device`` on a GPU.
"""
