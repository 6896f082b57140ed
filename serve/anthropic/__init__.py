"""Anthropic's Messages API, translated into chats."""
