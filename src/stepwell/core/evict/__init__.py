"""Which page leaves next: the protocol and the policies."""
