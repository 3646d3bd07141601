"""Patches of stock sglang: applied through its hook registry, but never failing open.

Stock `HookRegistry` logs an error and goes on unhooked. `PatchSet` adds what it leaves out: a target patched
twice raises, a target that does not exist raises, and `verify` fails loudly in any process in which a patch is
not in place. Source of the mechanism: sglang/srt/plugins/hook_registry.py.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

Kind = Literal["before", "after", "around", "replace"]


class PatchError(RuntimeError):
    """A patch could not be applied, or is not in place in this process."""


class Patch:
    """One change of one stock attribute. Subclasses say in their docstring what they replace and why.

    Attributes:
        target: dotted path of the attribute, e.g. `sglang.srt.managers.scheduler.Scheduler.foo`.
        kind: how `hook` meets the original, as in stock `HookType`:
            before: `hook(*args, **kwargs)` returns None or new `(args, kwargs)`;
            after: `hook(result, *args, **kwargs)` returns None or a new result;
            around: `hook(original, *args, **kwargs)`; replace: `hook(*args, **kwargs)`.
    """

    target: ClassVar[str]
    kind: ClassVar[Kind]

    @staticmethod
    def hook(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("a patch defines its hook")


def resolve(target: str) -> Any:
    """Return the object at a dotted path; raises PatchError naming the path when it is not there."""
    try:
        return pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise PatchError(f"patch target {target} does not exist in this sglang: {error}") from error


class LookForNoMethods(Patch):
    """Leaves a patched method out of stock's search for other names of what it has replaced.

    Stock looks through all names of all modules, 9,000 of them, at each patch: 40 ms of CPU, 30 times in each rank. A
    function may have been imported by name before it was patched; a method cannot be (a test looks for one).
    """

    target = "sglang.srt.plugins.hook_registry._propagate_patch"
    kind = "around"

    @staticmethod
    def hook(search: Callable[..., int], original: object, wrapped: object, owner: object) -> int:
        return 0 if isinstance(owner, type) else search(original, wrapped, owner)


@dataclass
class PatchSet:
    """The patches of one process.

    `apply` is idempotent for a patch class already applied; another class for the same target raises.
    """

    _applied: dict[str, type[Patch]] = field(default_factory=dict)
    _in_place: dict[str, Any] = field(default_factory=dict)

    def apply(self, *patches: type[Patch]) -> None:
        """Apply patches in order.

        Raises:
            PatchError: no docstring, an unknown target, a target that another patch holds, or a hook that
                the stock registry failed to install.
        """
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        for patch in patches:
            target = patch.target
            if not inspect.getdoc(patch) or patch.__doc__ is None:
                raise PatchError(f"{patch.__name__} has no docstring saying what it replaces and why")
            holder = self._applied.get(target)
            if holder is patch:
                continue
            if holder is not None:
                raise PatchError(f"{target} is patched by {holder.__name__} already; {patch.__name__} would hide it")
            before = resolve(target)
            if target in HookRegistry._patched:
                raise PatchError(f"{target} is hooked by another plugin already; {patch.__name__} would not be applied")
            HookRegistry.register(target, patch.hook, HookType(patch.kind))
            HookRegistry.apply_hooks()
            after = resolve(target)
            if after is before or target not in HookRegistry._patched:
                raise PatchError(f"{patch.__name__} was registered on {target}, but sglang did not apply it")
            self._applied[target] = patch
            self._in_place[target] = after

    def verify(self, *patches: type[Patch]) -> list[str]:
        """Check that each patch is in place in this process and return their names.

        Raises:
            PatchError: naming the patch and its target.
        """
        for patch in patches:
            if self._applied.get(patch.target) is not patch:
                raise PatchError(f"{patch.__name__} is not applied to {patch.target} in this process")
            if _unbound(resolve(patch.target)) is not _unbound(self._in_place[patch.target]):
                raise PatchError(f"{patch.__name__} on {patch.target} was overwritten after it was applied")
        return [patch.__name__ for patch in patches]


def _unbound(obj: Any) -> Callable[..., Any]:
    """A class method is a new bound object at each access; compare the function behind it."""
    return getattr(obj, "__func__", obj)


PATCHES = PatchSet()
"""The one set of this process; a forked child inherits it together with the patched modules."""


def look_for_no_methods() -> None:
    """Make the patches that follow in this process, and in those forked from it, take less time."""
    PATCHES.apply(LookForNoMethods)
