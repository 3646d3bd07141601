"""The demo model: a small trained Llama inside the package, so that the server can be tried and tested offline.

The files are in `model/` in Hugging Face's layout; its README.md is the model card. `scripts/train_demo_model.py`
made them.
"""

from __future__ import annotations

from pathlib import Path

DEMO_NAME = "demo"
"""What `/v1/models` calls it where it is served without `--model-path`, unless `--served-model-name` says otherwise."""
DEMO_DTYPE = "float32"
"""The `--dtype` to serve the demo model with. Stock sglang's `auto` would turn a float32 checkpoint into float16
(`sglang.srt.configs.model_config._get_and_verify_dtype`)."""


def demo_model_path() -> Path:
    """Return the folder of the demo model, to be given as `--model-path`.

    Raises:
        FileNotFoundError: the package was installed without the model's weights.
    """
    folder = Path(__file__).resolve().parent / "model"
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"The demo model's weights are not in {folder}; this sglang_adapt was installed without its data "
            "files. Install the wheel again, or name another model with --model-path."
        )
    return folder
