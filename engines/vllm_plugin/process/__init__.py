"""Starts and ends vLLM's processes, and contains the code that runs in vLLM's HTTP server.

``command`` builds vLLM's command line, ``server`` runs it, or says why it is refused, and
``middleware`` adds the cache header; ``processes`` ensures that no process is left running, and
keeps our threads from sharing the one core of the thread that starts them.
"""
