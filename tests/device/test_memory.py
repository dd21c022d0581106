from __future__ import annotations

import pytest
import torch

from baton.device.memory import enough_memory
from baton.wire.errors import InvalidSetting


def test_a_start_without_enough_memory_is_a_setting_that_does_not_fit() -> None:
    with pytest.raises(InvalidSetting, match=r"Tried to allocate 2 GiB\.; lower --num-blocks"), enough_memory():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore lines")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), r"no memory for this model and its KV: [0-9.]+ of [0-9.]+ GiB are free; .* --max-model-len"),
        (OSError(12, "Cannot allocate memory"), "this machine has no memory"),
        (
            RuntimeError("can't allocate memory: you tried to allocate 2147483648 bytes."),
            "2.00 GiB",
        ),
    ],
)
def test_a_host_without_enough_memory_says_what_there_is_and_which_flags_help(error: Exception, said: str) -> None:
    with pytest.raises(InvalidSetting, match=said), enough_memory():
        raise error


def test_other_errors_of_a_start_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes"), enough_memory():
        raise RuntimeError("shapes do not match")
