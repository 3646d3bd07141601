"""Fetching and unpacking Debian packages without installing them."""

from __future__ import annotations

import subprocess
from pathlib import Path


class PackageFetchError(RuntimeError):
    """A Debian package could not be downloaded or unpacked."""


def fetch_package(name: str, cache: Path) -> Path:
    """Return a folder with the unpacked files of the Debian package `name`; download it once into `cache`.

    Nothing is installed and no root is needed: `apt-get download` and `dpkg-deb --extract`.

    Raises:
        PackageFetchError: apt knows no such package, or the download or the unpacking failed.
    """
    unpacked = cache / name
    if unpacked.is_dir():
        return unpacked
    cache.mkdir(parents=True, exist_ok=True)
    _run(["apt-get", "download", name], cache, f"download the Debian package {name} (apt-get update first?)")
    archives = sorted(cache.glob(f"{name}_*.deb"))
    if not archives:
        raise PackageFetchError(f"apt-get download {name} left no {name}_*.deb in {cache}.")
    partial = cache / f".{name}.partial"
    _run(["dpkg-deb", "--extract", str(archives[-1]), str(partial)], cache, f"unpack {archives[-1].name}")
    partial.rename(unpacked)
    return unpacked


def package_version(name: str, cache: Path) -> str:
    """Return the version of the package that `fetch_package` put into `cache`."""
    archive = sorted(cache.glob(f"{name}_*.deb"))[-1]
    return _run(["dpkg-deb", "--field", str(archive), "Version"], cache, f"read {archive.name}").strip()


def _run(command: list[str], folder: Path, purpose: str) -> str:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise PackageFetchError(f"cannot {purpose}: {command[0]} is not here; run this on Debian or Ubuntu.") from None
    if done.returncode != 0:
        raise PackageFetchError(f"cannot {purpose}: {' '.join(command)} said: {done.stderr.strip()}")
    return done.stdout
