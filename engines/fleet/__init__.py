"""Several engines of one model, used as one engine; each session has a home among them."""
