"""Runs: config, identity, record, metrics and folder."""
