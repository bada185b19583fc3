"""Text in and out of sessions: prompts, answers piece by piece, and chats."""
