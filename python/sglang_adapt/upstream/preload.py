"""Imported once by the forkserver, so that every process forked from it has sglang loaded.

Front, router, detokenizer and all engine ranks are forked from here: one import for all of them. Nothing in
here may start a thread or initialise CUDA, because neither survives a fork.
"""

from __future__ import annotations

import gc
import os
import signal
import warnings

# torch asks NVML instead of the CUDA runtime whether there are GPUs; asking the runtime would initialise CUDA here
# and break it in every forked child (torch.cuda.is_available documents this variable).
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
# A crashing stock child tells its parent with SIGQUIT; the parent of all of them is the forkserver, which must
# live on. Our own entry points report a crash by their exit code instead.
signal.signal(signal.SIGQUIT, signal.SIG_IGN)
# Stock sends pickles between its processes unless told otherwise; msgpack can be read in part (upstream/wire.py).
os.environ["SGLANG_USE_PICKLE_IPC"] = "0"
warnings.filterwarnings("ignore", category=UserWarning, module=r"sglang\..*")

from sglang.srt.entrypoints import http_server  # noqa: E402, F401
from sglang.srt.managers import detokenizer_manager, scheduler  # noqa: E402, F401
from sglang.srt.model_executor import model_runner  # noqa: E402, F401
from sglang.srt.models import registry  # noqa: E402, F401
from sglang.srt.plugins import load_plugins  # noqa: E402

from sglang_adapt.core.process import die_with_parent  # noqa: E402

die_with_parent(signal.SIGKILL)
load_plugins()
gc.collect()
gc.freeze()

PRELOADED_PID = os.getpid()
"""The forkserver's process id; a process whose parent this is was forked from it."""
