"""New folders for a base and a delta, beside all that is there, and links that are turned to them."""
