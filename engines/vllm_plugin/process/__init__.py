"""Starts vLLM's processes and ends them, and runs what belongs to vLLM's HTTP server.

``command`` is vLLM's command line, ``server`` runs it and ``middleware`` adds the cache header;
``refusal`` carries a sentence to the process that started it; ``process_tree`` and ``parent_death``
leave no process running; ``affinity`` keeps our threads off the model's cores.
"""
