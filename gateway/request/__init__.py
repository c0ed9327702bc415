"""The steps of every request: its id and log line, its route, its caller and charges, its body."""
