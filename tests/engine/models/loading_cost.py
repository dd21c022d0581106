"""What loading a checkpoint takes: `python -m tests.engine.models.loading_cost CHECKPOINT`.

Prints for weights as they are, in int8 and in int4: seconds until they are packed, bytes of the files a second, what
memory they take, and how much more the process had at most meanwhile. The files are mapped, and their pages belong to
the system. Each kind loads in a process of its own; the first one may wait for the disk.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

from baton.engine.models.checkpoint import choose_dtype
from baton.engine.models.config import load_config
from baton.engine.models.decoder import TORCH_DTYPES, Decoder
from baton.engine.models.loading import load_weights
from baton.engine.models.ops.choose import choose_ops
from baton.engine.models.quantization.choose import choose_quantization
from baton.engine.models.quantization.while_loading import WHILE_LOADING
from baton.engine.models.weight_files import weight_files
from baton.engine.native.library import AUTO, open_kernels

_LOOK_S = 0.005
_MIB = 2**20


def own_bytes() -> int:
    """Of this process, without files that it has mapped."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


class Peak:
    """Looks at the memory of the process all the time."""

    def __init__(self) -> None:
        self.most = own_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self.most = max(self.most, own_bytes())

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


@torch.inference_mode()
def load(folder: Path, setting: str) -> str:
    """Load once; a line of the table."""
    config, kernels = load_config(folder), open_kernels(AUTO, torch.get_num_threads())
    quantization = choose_quantization(setting, config, folder, kernels)
    num_bytes = sum(path.stat().st_size for path in weight_files(folder))
    begin_s, before = time.monotonic(), own_bytes()
    with Peak() as peak:
        dtype = TORCH_DTYPES[choose_dtype("auto", config)]
        decoder = Decoder(config, dtype, "cpu", choose_ops(torch.device("cpu"), kernels), quantization=quantization)
        load_weights(folder, decoder)
        took_s = time.monotonic() - begin_s
    held = own_bytes()
    return (
        f"| {setting} | {took_s:.1f} s | {num_bytes / took_s / 1e9:.2f} GB/s | {(held - before) / _MIB:,.0f} MiB "
        f"| {(peak.most - held) / _MIB:,.0f} MiB |"
    )


def main() -> None:
    folder, *kind = sys.argv[1:]
    if kind:
        sys.stdout.write(f"{load(Path(folder), kind[0])}\n")
        return
    sys.stdout.write(
        "| weights | loaded and packed in | of the files | held | more at the peak |\n|---|---|---|---|---|\n"
    )
    sys.stdout.flush()
    for setting in WHILE_LOADING:
        subprocess.run([sys.executable, "-m", "tests.engine.models.loading_cost", folder, setting], check=True)


if __name__ == "__main__":
    main()
