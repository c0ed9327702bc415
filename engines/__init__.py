"""One protocol, its clients, and the islands that run inside an engine's own process.

``base`` is the protocol. The gateway's side: ``client``. Both sides: ``wire`` for control messages,
``http`` and ``openai`` for requests, ``config``. An engine's side: ``host`` for all of them;
``mlx_worker``, ``vllm_plugin``, ``fake_worker`` for one each.
``calibration`` measures what codecs cost a model.
"""
