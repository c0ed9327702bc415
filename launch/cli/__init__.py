"""The command line ``thermocline``: its commands, their options and their output."""
