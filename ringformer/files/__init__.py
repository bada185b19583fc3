"""Files: atomic writes, hashes, manifests, object stores, folders from strangers, and the names in a run's folder."""
