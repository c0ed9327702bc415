"""Short programs that explain the methods step by step; each prints figures and can draw them."""
