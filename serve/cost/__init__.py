"""The cost of requests: the machine's price and the ledger."""
