"""``thermocline plan``: this machine, other machines, and a fleet of them."""
