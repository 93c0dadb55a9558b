"""Reports about checkpoints: summaries, verification and pictures. No torch, no ranks."""
