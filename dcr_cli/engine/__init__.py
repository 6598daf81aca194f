"""Engines that serve from a checkpoint's folder, and are told over HTTP to load it again."""
