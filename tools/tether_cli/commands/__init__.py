"""One module per command; see `tether_cli.app`."""
