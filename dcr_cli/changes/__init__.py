"""What a version changes, decoded once on a host, for all that serve from it there: positions and new bits (FORMAT
12.1)."""
