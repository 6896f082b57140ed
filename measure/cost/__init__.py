"""The cost of requests on a machine paid by the hour, for `specbuild cost`."""
