"""OpenAI's completions and chats: whole and as events."""
