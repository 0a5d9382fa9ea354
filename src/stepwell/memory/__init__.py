"""Where raw bytes come from: regions, frames in them, leases, pins and views."""
