"""Estimates of training and inference, compiled for hardware that is absent: memory, collectives, seconds, and the
settings that fit."""
