"""Families of decoders: one file each with its configuration, its presets and its names at Hugging Face."""
