"""One protocol, its clients, and the islands that run inside an engine's own process.

``base`` is the protocol. The gateway uses ``client``. Both sides use ``wire`` for control messages,
``http`` and ``openai`` for requests, and ``config``. Engine processes use ``host``, which all of
them share, and one of ``mlx_worker``, ``vllm_plugin`` and ``fake_worker``.
``calibration`` measures the quality that each codec costs a model.
"""
