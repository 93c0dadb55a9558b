"""What runs inside the hosts of the lab."""
