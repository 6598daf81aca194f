"""Comparing on a CUDA device: which one, its memory and streams, batches that go there, changes that come back."""
