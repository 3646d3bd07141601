"""Sequence parallelism in a TP engine: a batch may run with its tokens shared out to the ranks instead of its heads.

The KV layout, attention and its metadata are those of tensor parallelism, so that each batch can run either way
(Shift Parallelism, arXiv 2509.16495). The store has all weights on every GPU and lies in the order of head groups,
so it costs no memory: columns `[r * w, (r + 1) * w)` of the whole QKV product are what rank r's own view would give.
Where the smallest TP size is t > 1, ranks use the weights as at TP t, and sums are left over t ranks (`base`).

- `base`: which part of tokens and weights is whose, and so which ranks are a group; `group`: their collectives.
- `exchange`: tokens for heads and back, between the ranks.
- `mode`: which way the batch runs that is computed now, and how many ran each way.
- `layers`, `install`: what a stock model's layers do then.
- `refusals`: what cannot run so; `counting`: batches that run in CUDA graphs, metrics.
"""
