"""sglang_adapt: an SGLang server whose parallel layout follows the traffic.

The rooms of this package and what each may import are listed in `sglang_adapt.floors`; the reasons are in
docs/architecture.md.
"""

from sglang_adapt.version import __version__

__all__ = ["__version__"]
