"""From a Hugging Face checkpoint to the portable graph."""
