"""Stock models over a store of weights: filling it, and engines whose parameters are views of it.

- `fill`: the keeper's side. Builds the model without memory and lets stock's own loaders write each shard of the
  finest TP size into the store.
- `attach`: an engine rank's side. Makes stock load the model through `loader.ViewLoader`, which binds every
  parameter to a view, and refuses what would write to the shared copy.
- `params` says what a stock model's parameters are, `block_order` reads fused outputs in the store's order,
  `refusals` names what cannot be shared.
"""
