"""What the datasets share whose prompts are texts of a file: tokens of a text, order, repetition."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bench.workload.dataset_settings import DatasetSettings
from bench.workload.passages import Passage
from bench.workload.seeds import generator
from bench.workload.turns import Conversation
from bench.workload.vocabulary import Vocabulary
from wire.errors import InvalidRequest, InvalidSetting


def check_has_text(settings: DatasetSettings, vocabulary: Vocabulary) -> None:
    """Raise `InvalidSetting` when texts cannot be tokenised."""
    if not vocabulary.has_text:
        name = settings.dataset_name
        raise InvalidSetting(f"--dataset-name {name} needs a tokenizer: name its folder with --tokenizer")


def passage_of(vocabulary: Vocabulary, text: str, where: str) -> Passage:
    """`text` with its tokens. Raises `InvalidSetting`."""
    try:
        return Passage(vocabulary.ids_of(text), text)
    except InvalidRequest as error:
        raise InvalidSetting(f"{where}: {error}") from None


def file_order(settings: DatasetSettings, num: int) -> list[int]:
    """The order in which `num` entries of a file are taken: shuffled unless `--disable-shuffle`."""
    if settings.disable_shuffle:
        return list(range(num))
    return [int(index) for index in generator(settings.seed, "order").permutation(num)]


def repeated(settings: DatasetSettings, conversations: Sequence[Conversation]) -> list[Conversation]:
    """`conversations`, and as many drawn from them again as are missing, unless `--no-oversample`."""
    num_missing = max(settings.num_prompts - len(conversations), 0)
    if settings.no_oversample or not num_missing:
        return list(conversations)
    chosen = np.asarray(generator(settings.seed, "repetition").integers(0, len(conversations), size=num_missing))
    return [*conversations, *(conversations[index] for index in chosen.tolist())]
