"""Every sharded checkpoint as one thing: shards plus byte ranges, detected by content, nothing executed."""
