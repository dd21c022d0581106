"""The grammar of a whole answer in gpt-oss's harmony: free messages on the channels for thoughts and remarks, then a
structure on the channel of the answer, or a call whose arguments are valid.

The answer ends with the last of them, with whatever token ends an output. Does not know whether the grammar can be
compiled, nor which tokens there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from baton.engine.text.answers.grammars import Functions
from baton.engine.text.answers.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START
from baton.engine.text.answers.lark import (
    SPACE,
    MarkerForm,
    form_of,
    free_text,
    has_form,
    json_by,
    marker_form,
    quoted,
    until,
)
from baton.wire.grammar import Grammar

_BOUNDED_MESSAGES = 2
"""A thought, and a remark before a call."""


@dataclass(frozen=True, slots=True)
class HarmonyShape:
    """The form that an answer may have, to a prompt that ends with the assistant's role.

    `may_reason`: thoughts may stand first. They and other remarks have `max_reasoning_tokens` at most, in two messages;
    None: any number of either. `structure`: the form of the answer; None: any text. `functions`: the schemas of the
    arguments of functions that may be called instead; one has to be called where the model `must_call`.
    """

    structure: Grammar | None = None
    functions: Functions = field(default_factory=dict)
    may_reason: bool = True
    must_call: bool = False
    max_reasoning_tokens: int | None = None

    @property
    def can_be_grammar(self) -> bool:
        """Whether the structure can stand behind something else."""
        return self.structure is None or has_form(self.structure)

    def grammar(self, token_of: Callable[[str], int | None]) -> Grammar:
        """The grammar of all of it. Raises `InvalidRequest` when it is too long."""
        marker = marker_form(token_of)
        channels = ["commentary", *(["analysis"] if self.may_reason else [])]
        named = " | ".join(map(quoted, channels))
        last = [*([] if self.must_call else ["final"]), *(f"call_{number}" for number in range(len(self.functions)))]
        budget = self.max_reasoning_tokens
        most = None if budget is None else budget // _BOUNDED_MESSAGES
        before = "before* " if most is None else f"before{{0,{_BOUNDED_MESSAGES}}} " if most else ""
        rules = [
            f"start: {before}({' | '.join(last)})",
            f'before: {marker(CHANNEL)} ({named}) {marker(MESSAGE)} said {marker(START)} "assistant"',
            *until("said", END, marker, max_tokens=most),
            f'kind: (SPACE | SPACE? {marker(CONSTRAIN)} SPACE?) "json" SPACE?',
            SPACE,
            *([] if self.must_call else self._final(marker)),
            *self._calls(marker),
        ]
        return Grammar.lark("\n".join(rules) + "\n")

    def _final(self, marker: MarkerForm) -> list[str]:
        begun = f'final: {marker(CHANNEL)} "final"'
        if self.structure is None:
            return [f"{begun} {marker(MESSAGE)} FREE?", free_text("FREE", START, CHANNEL)]
        return [f"{begun} (kind | SPACE)? {marker(MESSAGE)} structure", f"structure: {form_of(self.structure)}"]

    def _calls(self, marker: MarkerForm) -> list[str]:
        """The recipient stands behind the channel, as models write it, or before it, as the template does."""
        rules = []
        for number, (name, schema) in enumerate(self.functions.items()):
            to = f"to=functions.{name}"
            on_channel = f"{marker(CHANNEL)} {quoted(f'commentary {to}')}"
            before_it = f'{quoted(f" {to}")} {marker(CHANNEL)} "commentary"'
            rules.append(
                f"call_{number}: ({on_channel} | {before_it}) (kind | SPACE)? {marker(MESSAGE)} {json_by(schema)}"
            )
        return rules
