"""Engines that take versions of a remote into the model that they serve, by calls of their own: each of their ranks is
a live receiver.

vLLM finds it as a plugin (`plugin.py`), SGLang by a function that it is told of (`sglang.py`). Nothing of an engine is
imported before that engine asks for it.
"""
