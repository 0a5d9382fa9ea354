"""Plain loops that other code is measured against. They are frozen: a faster one gets a new name."""
