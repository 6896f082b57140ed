"""`specbuild tune`: what a round takes here, how often drafts come true, and which trees follow from both."""
