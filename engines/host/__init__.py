"""The parts of every engine process of ours: control server, lifeline, hashes of weights."""
