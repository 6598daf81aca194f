"""Deltas: what changed, how it is coded, and the documents and payloads that hold it (FORMAT.md)."""
