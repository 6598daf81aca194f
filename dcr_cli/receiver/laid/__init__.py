"""Receivers whose folders store tensors another way: read, patched and checked through a layout."""
