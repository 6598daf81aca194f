"""Comparing on a CUDA device: which one, its memory and streams, pieces that go there, changes that come back."""
