"""Programs that run inside the hosts of the lab."""
