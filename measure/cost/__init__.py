"""What requests cost on a machine that is paid by the hour: for `specbuild cost`."""
