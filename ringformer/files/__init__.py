"""Files that are whole or not there: atomic writes, hashes, manifests, buckets, files of strangers, names in a run
folder.
"""
