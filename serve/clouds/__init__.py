"""What clouds' and text-generation-inference's clients send: thin routes over chats and completions."""
