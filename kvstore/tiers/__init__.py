"""Where packed blobs rest: RAM, disk, Redis. One protocol, one shared test suite."""
