"""How many drafts were right is found on a device as the scheduler finds it, in steps of any requests."""

from __future__ import annotations

import torch

from baton.device.host import HostStaging
from baton.engine.runner.drafted_rows import DraftedRows
from baton.engine.scheduler.request import Fork, ScheduledRequest
from baton.wire.prompt import Prompt
from baton.wire.sampling import DecodingParams
from tests.request_keys import B, C, key_of

PARAMS = DecodingParams()


def share(name: str, *drafts: int, needs_sample: bool = True, forks: tuple[Fork, ...] = ()) -> ScheduledRequest:
    plain = ScheduledRequest(key_of(name), 4, 1, [1, 2, 3, 4, 5], Prompt((1, 2)), (0, 1), PARAMS, needs_sample)
    return plain._replace(forks=forks).with_drafts(drafts)


def num_accepted(shares: list[ScheduledRequest], token_ids: list[int], *not_numbers: int) -> list[int]:
    staging = HostStaging()
    staging.begin()
    drafted = DraftedRows.put(shares, staging)
    assert drafted is not None
    staging.upload()
    is_valid = torch.tensor([row not in not_numbers for row in range(len(token_ids))])
    return drafted.num_accepted(torch.tensor(token_ids), is_valid).tolist()


def test_a_step_without_drafts_has_none() -> None:
    assert DraftedRows.put([share("a"), share("b")], HostStaging()) is None


def test_drafts_are_right_up_to_the_first_that_was_not_sampled_or_a_row_without_a_number() -> None:
    drafts = share("a", 11, 12, 13)
    for token_ids, count in (([11, 12, 13, 9], 3), ([11, 12, 9, 9], 2), ([11, 9, 13, 9], 1), ([9, 12, 13, 9], 0)):
        assert num_accepted([drafts], token_ids) == [count]
    assert [num_accepted([drafts], [11, 12, 13, 9], row) for row in range(4)] == [[0], [1], [2], [3]]


def test_rows_of_others_lie_between() -> None:
    forks = (Fork(B, PARAMS), Fork(C, PARAMS))
    shares = [share("x"), share("y", 5, 6), share("z", needs_sample=False), share("a", forks=forks), share("w", 7)]
    # x; y and two drafts; three choices; w and a draft
    assert num_accepted(shares, [5, 5, 6, 8, 7, 7, 7, 7, 9]) == [2, 1]
    assert num_accepted(shares, [5, 5, 8, 6, 7, 7, 7, 8, 7]) == [1, 0]
