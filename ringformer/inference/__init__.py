"""Inference with a trained model on a mesh: continues prompts and answers chats; the ring shards the cache."""
