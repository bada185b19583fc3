"""Training and inference compiled for absent hardware: memory, collectives, seconds, and the settings that fit."""
