"""MRCR: one of several answers to the same request, far back in a long conversation, is to be given again."""
