"""The mlx_lm engine: a process of its own, ``python -m engines.mlx_worker``.

No other package imports it. One owner thread uses mlx; an asyncio thread serves HTTP and the
control protocol; codec threads use numpy only. A chat request goes this way:

1. ``http.py`` reads the request; the gateway has named its session.
2. ``prompt/request_planner.py`` plans it, off the event loop: token ids, sampling, grammar.
3. ``owner.py`` hands the plan's generations to the owner thread.
4. ``batch/admission.py`` admits the prompt once its memory budget has room.
5. ``batch/prefix_reuse.py`` finds KV to start from: a hot session's, or from the cold store.
6. ``batch/prefill.py`` feeds the rest of the prompt, chunk by chunk.
7. ``batch/batches.py`` decodes, one token per sequence and step.
8. ``generation.py`` carries the tokens back to the event loop.
9. ``answer/reply.py`` and ``answer/reply_format.py`` turn them into text, tool calls and chunks.
10. ``batch/request.py`` ends the turn, whether it is complete or cancelled.
11. ``sessions/hot_sessions.py`` keeps the turn's KV hot and saves it in the cold store.
"""
