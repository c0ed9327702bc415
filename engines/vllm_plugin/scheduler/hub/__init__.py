"""The socket that the plug-in's processes connect to, and the answers of its ranks so far."""
