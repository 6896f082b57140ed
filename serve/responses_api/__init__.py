"""OpenAI's Responses API, translated into chats."""
