"""OpenAI's Responses API and Anthropic's Messages API, translated into chats."""
