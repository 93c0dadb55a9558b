"""Read checkpoints of any format as shards with byte ranges; nothing in a file is executed. No torch, no ranks."""
