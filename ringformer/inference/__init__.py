"""A trained model on its mesh: prompts continued, chats answered, with the cache sharded over the ring."""
