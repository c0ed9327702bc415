"""What every request passes: an id and a log line, its route, its caller and charges, its body."""
