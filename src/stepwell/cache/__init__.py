"""What engines hold KV with: `pool` on the device; the tiers below it come next."""
