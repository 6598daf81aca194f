"""A server that hands a remote on to its children, each object fetched once (FORMAT 15)."""
