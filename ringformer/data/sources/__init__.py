"""Sources of documents, records and tokens: files, compressed or not, and Hugging Face datasets."""
