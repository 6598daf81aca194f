"""Residual rules: canonical tensors whose bits are not those that are stored, but made of them (FORMAT 14).

rules.py says which kinds there are and checks what a layout says of them, floats.py and quantize.py are their
arithmetic, function.py calls what a user names, sources.py reads through them. Where elements lie, none of them knows.
"""
