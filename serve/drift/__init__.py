"""Whether texts and drafts still are as in a reference window."""
