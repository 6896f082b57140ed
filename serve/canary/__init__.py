"""A canary: a share of requests runs as a candidate, which is rolled back if it is worse."""
