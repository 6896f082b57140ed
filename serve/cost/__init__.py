"""The cost of requests: the machine's price, the ledger, the energy meter."""
