"""Receivers at a state that is given as plain files: what is there of it is found, the rest is fetched."""
