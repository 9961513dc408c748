"""The command `lightning-zero`."""
