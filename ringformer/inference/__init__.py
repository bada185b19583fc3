"""Inference with a trained model on a mesh: it continues prompts and answers chats, with the cache sharded over the
ring."""
