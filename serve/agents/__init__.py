"""The API that agents speak beside chats, OpenAI's responses, as a translation into chats."""
