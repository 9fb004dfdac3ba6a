"""A folder of LoRA adapters, one in each subfolder, as peft or `armillary train` writes them."""

from pathlib import Path

from armillary.errors import BadInput

ADAPTER_CONFIG = "adapter_config.json"


def adapter_folders(folder: Path | str) -> dict[str, Path]:
    """Name -> folder of each adapter."""
    folders = {path.parent.name: path.parent for path in sorted(Path(folder).glob(f"*/{ADAPTER_CONFIG}"))}
    if not folders:
        raise BadInput(f"{folder} has no adapters; serve.adapters is a folder with one subfolder per adapter")
    return folders
