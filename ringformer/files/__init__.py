"""Files: atomic writes, hashes, manifests, object stores, untrusted folders, and the names of files in a run's
folder."""
