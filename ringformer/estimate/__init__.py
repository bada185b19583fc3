"""Training and inference compiled for hardware that is not here: memory, collectives, seconds, and the settings that
fit.
"""
