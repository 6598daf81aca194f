"""Passes over tensors: reading, decoding, patching and digesting them in threads and in bounded memory."""
