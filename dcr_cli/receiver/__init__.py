"""Receivers: how a checkpoint is brought from a base to a target so that it can be stopped at any step."""
