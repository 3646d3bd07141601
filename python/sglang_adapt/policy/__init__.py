"""Floor 1: decisions as pure functions over plain data, shared by the router and the simulator."""
