"""The version gate: which sglang and torch this package was verified against, and a refusal of any other."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

SUPPORTED = {"sglang": "0.5.17", "torch": "2.11.0"}


class UnsupportedVersionError(RuntimeError):
    """An installed package is not the one release whose internals `upstream/` was verified against."""


def check_versions() -> dict[str, str]:
    """Return the installed versions of `SUPPORTED`'s packages.

    A local version label is ignored (torch 2.11.0+cu130 is torch 2.11.0).

    Raises:
        UnsupportedVersionError: one is missing or differs; the text names both versions and the way out.
    """
    found: dict[str, str] = {}
    for package, wanted in SUPPORTED.items():
        try:
            installed = version(package)
        except PackageNotFoundError:
            raise UnsupportedVersionError(
                f"{package} is not installed; sglang_adapt needs {package}=={wanted}. "
                f"Install it with: pip install '{package}=={wanted}'"
            ) from None
        if installed.split("+")[0] != wanted:
            raise UnsupportedVersionError(
                f"{package} {installed} is installed, but sglang_adapt supports {package}=={wanted} only, "
                f"because it uses internals that change between releases. "
                f"Install it with: pip install '{package}=={wanted}'"
            )
        found[package] = installed
    return found
