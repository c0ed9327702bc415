"""The parts of every engine process of ours: control server, lifeline, weights, fair shares."""
