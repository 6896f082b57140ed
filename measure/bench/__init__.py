"""`specbuild bench`: plain decoding and speculation on the same prompts, in turns."""
