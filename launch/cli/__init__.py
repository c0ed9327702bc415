"""The command line ``thermocline``: its commands, their options, and all that is printed."""
