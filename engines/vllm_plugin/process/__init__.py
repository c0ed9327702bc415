"""Starts and ends vLLM's processes, and contains the code that runs in vLLM's HTTP server.

``command`` builds vLLM's command line, ``server`` runs it and ``middleware`` adds the cache header;
``refusal`` passes a sentence to the process that started it; ``process_tree`` and ``parent_death``
ensure that no process is left running; ``affinity`` keeps our threads from sharing the one core of
the thread that starts them.
"""
