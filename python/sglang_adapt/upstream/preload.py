"""Imported once by the forkserver, so that every process forked from it has sglang loaded.

Front, router, detokenizer and all engine ranks are forked from here: one import for all of them. Nothing in
here may start a thread or initialise CUDA, because neither survives a fork.
"""

from __future__ import annotations

import gc
import signal
import warnings

import setproctitle

# Nothing of what is imported becomes garbage, and looking for it again and again is a seventh of the time.
gc.disable()

# A crashing stock child tells its parent with SIGQUIT; the parent of all of them is the forkserver, which must
# live on. Our own entry points report a crash by their exit code instead.
signal.signal(signal.SIGQUIT, signal.SIG_IGN)
# Sent to all processes of a server, it is for the first one and the front; if this one ended, so would all others.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
warnings.filterwarnings("ignore", category=UserWarning, module=r"sglang\..*")

from sglang_adapt.core.process import die_with_parent  # noqa: E402
from sglang_adapt.upstream import cuda_facts  # noqa: E402
from sglang_adapt.upstream.entry_points import has_cuda  # noqa: E402
from sglang_adapt.upstream.patch import look_for_no_methods  # noqa: E402

die_with_parent(signal.SIGKILL)
if has_cuda():
    cuda_facts.answer_from(cuda_facts.ask_devices())

from sglang.srt.entrypoints import http_server  # noqa: E402, F401
from sglang.srt.managers import detokenizer_manager, scheduler  # noqa: E402, F401
from sglang.srt.model_executor import model_runner  # noqa: E402, F401
from sglang.srt.models import registry  # noqa: E402, F401
from sglang.srt.plugins import load_plugins  # noqa: E402

look_for_no_methods()
load_plugins()
if has_cuda():
    cuda_facts.assert_cuda_untouched()
gc.collect()
gc.freeze()
gc.enable()

# The library finds the memory for titles at its first call, and no more after the environment has been changed,
# which forked processes do.
setproctitle.setproctitle("sglang_adapt::forkserver")
