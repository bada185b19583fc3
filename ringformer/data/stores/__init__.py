"""Token stores: prepared from documents, verified by hashes, read in blocks."""
