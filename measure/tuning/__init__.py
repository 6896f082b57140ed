"""`specbuild tune`: what a round costs here, how often drafts come true, and which trees follow from both."""
