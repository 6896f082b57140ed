"""`specbuild tune`: measures step times and draft acceptance on this machine, and derives which trees pay."""
