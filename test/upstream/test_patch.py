"""Patches: applied, verified, and loud when anything is wrong."""

from __future__ import annotations

import inspect
import types
from typing import Any

import pytest
from sglang.srt.plugins import hook_registry
from weights_engines import forkserver, in_child, said_by

from sglang_adapt.upstream import version
from sglang_adapt.upstream.patch import Patch, PatchError, PatchSet


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A stand-in for a module of sglang, under a name of its own."""
    import sys

    fake = types.ModuleType("fake_sglang")

    class Thing:
        def double(self, x: int) -> int:
            return 2 * x

        @classmethod
        def make(cls) -> str:
            return cls.__name__

    fake.Thing = Thing  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_sglang", fake)
    monkeypatch.setattr(hook_registry.HookRegistry, "_hooks", hook_registry.defaultdict(list))
    monkeypatch.setattr(hook_registry.HookRegistry, "_patched", set())
    return fake


class Triple(Patch):
    """Returns three times the argument, to be seen."""

    target = "fake_sglang.Thing.double"
    kind = "replace"

    @staticmethod
    def hook(self: Any, x: int) -> int:
        return 3 * x


class AlsoDouble(Patch):
    """Another patch of the same method."""

    target = "fake_sglang.Thing.double"
    kind = "replace"

    @staticmethod
    def hook(self: Any, x: int) -> int:
        return 4 * x


class MakeOther(Patch):
    """Replaces a class method."""

    target = "fake_sglang.Thing.make"
    kind = "replace"

    @staticmethod
    def hook(cls: type) -> str:
        return f"patched {cls.__name__}"


class NoSuchTarget(Patch):
    """Names an attribute that is not there."""

    target = "fake_sglang.Thing.absent"
    kind = "replace"


def test_applied_and_verified(module: types.ModuleType) -> None:
    patches = PatchSet()
    patches.apply(Triple, MakeOther)
    patches.apply(Triple)
    assert module.Thing().double(5) == 15
    assert module.Thing.make() == "patched Thing"
    assert patches.verify(Triple, MakeOther) == ["Triple", "MakeOther"]


def test_the_same_target_twice_raises(module: types.ModuleType) -> None:
    patches = PatchSet()
    patches.apply(Triple)
    with pytest.raises(PatchError, match=r"Thing\.double is patched by Triple already; AlsoDouble"):
        patches.apply(AlsoDouble)
    assert module.Thing().double(5) == 15


def test_a_target_hooked_by_another_plugin_raises(module: types.ModuleType) -> None:
    PatchSet().apply(Triple)
    with pytest.raises(PatchError, match="another plugin"):
        PatchSet().apply(AlsoDouble)


def test_unknown_target_raises(module: types.ModuleType) -> None:
    with pytest.raises(PatchError, match=r"Thing\.absent does not exist"):
        PatchSet().apply(NoSuchTarget)


def test_verify_finds_what_is_missing_or_overwritten(module: types.ModuleType) -> None:
    patches = PatchSet()
    with pytest.raises(PatchError, match="Triple is not applied"):
        patches.verify(Triple)
    patches.apply(Triple)
    module.Thing.double = lambda self, x: x
    with pytest.raises(PatchError, match="overwritten"):
        patches.verify(Triple)


def test_a_patch_must_say_why(module: types.ModuleType) -> None:
    silent = type("Silent", (Patch,), {"target": "fake_sglang.Thing.double", "kind": "replace", "__doc__": None})
    with pytest.raises(PatchError, match="no docstring"):
        PatchSet().apply(silent)


@pytest.mark.engine
def test_all_our_patches_fit_the_installed_sglang() -> None:
    """In a process of its own, because patches cannot be taken back."""
    code, text = in_child(forkserver(), said_by, "sglang_adapt.check")
    assert code == 0, text
    for name in ("RouterInsteadOfSchedulers", "OneOutputSocket", "UnlinkMessageQueue"):
        assert name in text


def test_version_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    assert version.check_versions()["sglang"] == "0.5.17"
    monkeypatch.setattr(version, "version", lambda package: "0.5.23" if package == "sglang" else "2.11.0+cu130")
    with pytest.raises(version.UnsupportedVersionError, match=r"sglang 0\.5\.23 is installed.*sglang==0\.5\.17"):
        version.check_versions()
    monkeypatch.setattr(version, "version", lambda package: "0.5.17" if package == "sglang" else "2.11.0+cu130")
    assert version.check_versions()["torch"] == "2.11.0+cu130"

    def missing(package: str) -> str:
        raise version.PackageNotFoundError(package)

    monkeypatch.setattr(version, "version", missing)
    with pytest.raises(version.UnsupportedVersionError, match="not installed"):
        version.check_versions()


@pytest.mark.engine
def test_no_method_that_we_patch_is_known_by_another_name() -> None:
    """What the search that is left out would find: a name of a module that is bound to a method."""
    patched, known = in_child(forkserver(), methods_known_by_name)
    assert len(patched) > 30
    assert "sglang.srt.managers.scheduler.Scheduler.flush_cache" in patched
    assert known == ["sglang_adapt.upstream.patch.a_method_by_name"], "the one put there to be found, and no other"


def methods_known_by_name() -> tuple[list[str], list[str]]:
    """In a process that has loaded sglang: methods that have a patch, and names of modules for them."""
    import importlib
    import pkgutil
    import sys

    from sglang.srt.managers.scheduler import Scheduler

    from sglang_adapt import upstream
    from sglang_adapt.upstream import patch

    for module in pkgutil.walk_packages(upstream.__path__, f"{upstream.__name__}."):
        importlib.import_module(module.name)
    ours = [each for each in all_below(Patch) if each.__module__ != __name__]
    targets = [each.target for each in ours if hasattr(each, "target")]
    owners = {target: pkgutil.resolve_name(target.rpartition(".")[0]) for target in targets}
    originals = {
        target: inspect.unwrap(getattr(owner, target.rpartition(".")[2]))
        for target, owner in owners.items()
        if isinstance(owner, type)
    }
    patch.a_method_by_name = Scheduler.flush_cache  # type: ignore[attr-defined]
    ids = {id(getattr(original, "__func__", original)) for original in originals.values()}
    known = [
        f"{name}.{key}"
        for name, module in list(sys.modules.items())
        if isinstance(module, types.ModuleType)
        for key, value in list(vars(module).items())
        if id(getattr(value, "__func__", value) if isinstance(value, types.MethodType) else value) in ids
    ]
    return sorted(originals), known


def all_below(kind: type[Patch]) -> list[type[Patch]]:
    return [found for below in kind.__subclasses__() for found in (below, *all_below(below))]
