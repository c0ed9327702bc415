"""Takes over profiles that other engines of the fleet have published, and publishes our own.

``fleet_profiles`` joins the measurement, the gate and ``kvstore.published``; ``short_check`` says
whether a profile does here what it did where it was measured.
"""
