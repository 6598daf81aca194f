"""Layouts: how the tensors of files relate to canonical tensors. Which module owns what is said by each of them."""
