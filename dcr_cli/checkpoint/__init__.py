"""Checkpoints as they lie on disk: folders, shards, headers, weight maps, names, digests. Read only."""
