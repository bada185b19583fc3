"""Checkpoints: sharded arrays on disk by Orbax, with hashes, retention, verification and copies; and saved models."""
