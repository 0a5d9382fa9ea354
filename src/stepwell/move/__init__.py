"""Who acts: copies between device and tiers, queues, deadlines. Knows no policy."""
