"""The mlx_lm engine: a process of its own, ``python -m engines.mlx_worker``.

No other package imports it. One owner thread uses mlx; an asyncio thread serves HTTP and the
control protocol; codec threads use numpy only. The way of a chat:

1. ``http.py`` checks the request; the gateway has named its session.
2. ``prompt/request_planner.py`` plans it, off the event loop: token ids, sampling, grammar.
3. ``owner.py`` takes the plan's generations over to the owner thread.
4. ``batch/admission.py`` lets the prompt in once the budget of ``batch/batches.py`` has room.
5. ``batch/prefix_reuse.py`` finds KV to start from: a hot session's, or from the cold store.
6. ``batch/prefill.py`` feeds the rest of the prompt, chunk by chunk.
7. ``batch/batches.py`` decodes, one token per sequence and step.
8. ``generation.py`` carries the tokens back to the event loop.
9. ``answer/reply.py`` and ``answer/reply_format.py`` make text, tool calls and chunks of them.
10. ``batch/request.py`` ends the turn, also a cancelled one.
11. ``sessions/hot_sessions.py`` keeps its KV hot and saves it in the cold store.
"""
