"""Remotes: reading and writing what lies in a store that may be far away, slow, and wrong about itself."""
