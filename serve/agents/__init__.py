"""What agents speak beside chats, OpenAI's responses and Anthropic's messages, as translations into chats."""
