"""Floor 2: the KV memory of one GPU as blocks, who holds them, and how they are copied between TP sizes."""
