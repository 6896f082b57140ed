"""Routes for clients of cloud platforms and text-generation-inference: thin layers over chats and completions."""
