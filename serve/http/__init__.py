"""From a socket to a route: connections, the gate, the application, and the server's life."""
