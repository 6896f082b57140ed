"""A page to chat with a model and to look at its speculation: `specbuild serve --ui`."""
