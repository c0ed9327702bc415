"""The settings by which each client finds a server: lines to enter, and changes to its own file."""
