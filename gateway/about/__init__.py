"""What the server tells of itself: that it lives, its figures, and the description of its API."""
