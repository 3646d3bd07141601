"""Floor 0: plain data that every room shares. Standard library and msgspec only."""
