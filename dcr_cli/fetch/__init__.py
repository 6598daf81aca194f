"""How a receiver comes by a version of a remote: where it stands, which way leads there, and what has to be fetched."""
