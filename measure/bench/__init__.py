"""`specbuild bench`: compares plain decoding and speculation, which take turns on the same prompts."""
