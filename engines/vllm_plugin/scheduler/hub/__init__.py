"""The socket on which the plug-in's processes meet, and what its ranks have answered so far."""
