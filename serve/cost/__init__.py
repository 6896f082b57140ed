"""What requests cost: the machine's price, the ledger, the energy meter."""
