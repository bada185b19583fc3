"""Reproduction of the paper's tables and figures; no other room imports this one."""
