"""Receivers with a layout at a state that is given as plain files: their shards are cut out of these and installed."""
