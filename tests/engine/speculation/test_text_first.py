"""Text drafts where it is sure, and the model beside it where it is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.engine.scheduler.proposer import FREE, NO_DRAFT, Draft, DraftCost, Wanted
from baton.engine.scheduler.request import Request
from baton.engine.speculation.text_first import TextFirst
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.request_keys import A, B, C


@dataclass
class Sure:
    """As sure as it is told to be of each request; 0: it does not follow it."""

    method: str
    confidences: dict[RequestKey, float]
    stores_kv: bool = False
    made: DraftCost = FREE
    asked: list[RequestKey] = field(default_factory=list)
    forgotten: list[RequestKey] = field(default_factory=list)

    def follows(self, request: Request) -> bool:
        return self.confidences.get(request.key, 0.0) > 0.0

    def cost(self, request: Request) -> DraftCost:
        return self.made

    def propose(self, wanted: Sequence[Wanted]) -> list[Draft]:
        self.asked += [each.request.key for each in wanted if each.max_tokens > 1]
        sure = [self.confidences.get(each.request.key, 0.0) for each in wanted]
        return [Draft([1], [confidence], self.method) if confidence else NO_DRAFT for confidence in sure]

    def verified(self, request: Request, draft: Draft, num_accepted: int) -> None:
        pass

    def forget(self, request: Request) -> None:
        self.forgotten.append(request.key)


def request(key: RequestKey) -> Request:
    return Request(key, Prompt.of((1, 2)), DecodingParams(), b"", 64)


def test_each_request_gets_the_draft_of_text_that_is_sure_and_else_of_the_model() -> None:
    text = Sure("suffix", {A: 0.9, B: 0.3})
    model = Sure("draft_model", {A: 0.8, B: 0.8, C: 0.8}, stores_kv=True, made=DraftCost(0.1, 0.01))
    declined = set[RequestKey]()
    both = TextFirst(text, model, lambda request: request.key in declined)
    requests = [request(key) for key in (A, B, C)]
    assert (both.method, both.stores_kv) == ("draft_model", True)
    assert [both.follows(each) for each in requests] == [True, True, True]
    assert [both.cost(each) for each in requests] == [FREE, model.made, model.made]
    drafts = both.propose([Wanted(each, 4) for each in requests])
    assert [draft.method for draft in drafts] == ["suffix", "draft_model", "draft_model"]
    assert (text.asked, model.asked) == ([A], [B, C])
    text.confidences[A] = 0.1
    assert both.cost(requests[0]) == model.made
    assert [draft.method for draft in both.propose([Wanted(requests[0], 4)])] == ["draft_model"]
    declined |= {B, C}
    assert [both.follows(each) for each in requests] == [True, True, False]
    assert both.cost(requests[1]) == FREE
    assert [draft.method for draft in both.propose([Wanted(requests[1], 4)])] == ["suffix"]


def test_a_request_that_the_model_cannot_follow_has_what_the_text_says() -> None:
    text, model = Sure("suffix", {A: 0.3}), Sure("mtp", {}, made=DraftCost(0.1, 0.01))
    both, alone = TextFirst(text, model, lambda _: False), request(A)
    assert both.follows(alone)
    assert both.cost(alone) == FREE
    assert both.propose([Wanted(alone, 4)])[0].method == "suffix"
    both.forget(alone)
    assert text.forgotten == model.forgotten == [A]
