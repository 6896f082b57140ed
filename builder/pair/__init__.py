"""`specbuild pair`: measures what a draft is worth to a target on this machine, before anything is shipped."""
