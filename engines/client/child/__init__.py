"""Engines that the gateway starts itself: child process, supervisor, the program of each kind."""
