"""What each client needs to talk to a server: its lines, and the values of its own file."""
