"""This server's part of the directory of sessions that several servers on one Redis keep."""
