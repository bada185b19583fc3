"""The gated delta rule, on one device and along a ring."""
