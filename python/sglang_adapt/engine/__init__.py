"""What runs in the processes of an engine's ranks."""
