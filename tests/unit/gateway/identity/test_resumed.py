"""A chat goes on in its session when its client, started again, writes an older question anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.unit.gateway.identity.test_known_chats import ALICE, Answered, chain_of

SYSTEM = {"role": "system", "content": "rules " * 200}
DATE = "The date is Tuesday. "
TOOLS = [{"type": "function", "function": {"name": "read"}}]


class Sessions:
    """A tenant's chats with tools, whose sessions are all there."""

    def __init__(self) -> None:
        self.seen = Answered(tokens=400)

    def ask(self, *messages: dict[str, Any], answer: str = "") -> str:
        session = self.seen.ask(messages, TOOLS)
        if note := self.seen.chats.on_words(ALICE, session, chain_of(messages, tools=TOOLS)):
            note(answer)
        return session


def user(text: str, *before: str) -> dict[str, Any]:
    """A question in parts, as qwen-code writes it, with reminders before it."""
    return {"role": "user", "content": [{"type": "text", "text": x} for x in (*before, text)]}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def calls(id: str, text: str = "") -> Sequence[dict[str, Any]]:
    """A call of a tool and what it returned."""
    call = {"id": id, "type": "function", "function": {"name": "read", "arguments": "{}"}}
    asked = {"role": "assistant", "content": text or None, "tool_calls": [call]}
    return asked, {"role": "tool", "tool_call_id": id, "content": "12 stones"}


def test_a_first_question_without_its_reminder_is_known_by_the_answer():
    sessions = Sessions()
    first = sessions.ask(SYSTEM, user("one?", DATE), answer="One.")
    other = sessions.ask(SYSTEM, user("another?", DATE), answer="Another.")
    assert other != first
    turns = (SYSTEM, user("one?"), assistant("One."), user("two?", DATE))
    assert sessions.ask(*turns, answer="Two.") == first
    again = (*turns[:3], user("two?"), assistant("Two."), user("three?", DATE))
    assert sessions.ask(*again) == first
    assert sessions.ask(SYSTEM, user("another?"), assistant("Another."), user("more?")) == other


def test_turns_of_any_number_of_calls_are_known_by_the_first_of_them():
    sessions = Sessions()
    start = (SYSTEM, user("one?", DATE))
    first = sessions.ask(*start, answer="I look.")
    steps = [*calls("call_1", "I look."), *calls("call_2"), *calls("call_3")]
    for n in (2, 4, 6):
        assert sessions.ask(*start, *steps[:n], answer="Done." if n == 6 else "") == first
    turns = [SYSTEM, user("one?"), *steps, assistant("Done."), user("two?", DATE)]
    assert sessions.ask(*turns) == first
    more = [*calls("call_4"), *calls("call_5"), *calls("call_6")]
    assert sessions.ask(*turns, *more, answer="So.") == first
    turns[-1] = user("two?")
    assert sessions.ask(*turns, *more, assistant("So."), user("three?", DATE)) == first


def test_another_chat_of_the_same_first_question_and_call_is_not_taken_over():
    """Some servers number calls from zero, and agents often look at the same thing first."""
    sessions = Sessions()
    begin = (SYSTEM, user("Mend the tests.", DATE), *calls("call_0", "I look."))
    first = sessions.ask(*begin, assistant("One fails."), user("why?"), answer="A typo.")
    other = (SYSTEM, user("Mend the tests."), *calls("call_0", "I look."))
    ends = (assistant("All pass."), user("and now?"), assistant("Sleep."), user("no"))
    assert sessions.ask(*other, *ends) != first
    ends = (assistant("One fails."), user("why?"), assistant("A typo."), user("mend it"))
    assert sessions.ask(*other, *ends) == first


def test_another_answer_length_or_system_text_or_a_busy_session_is_another_chat():
    sessions = Sessions()
    first = sessions.ask(SYSTEM, user("one?", DATE), answer="One.")
    went_on = (user("one?"), assistant("One."), user("two?"))
    other = {"role": "system", "content": "be brief " * 200}
    assert sessions.ask(SYSTEM, user("one?"), assistant("Two."), user("two?")) != first
    assert sessions.ask(SYSTEM, *went_on, assistant("Two."), user("three?")) != first
    assert sessions.ask(other, *went_on) != first
    sessions.seen.busy = {first}
    assert sessions.ask(SYSTEM, *went_on) != first


def test_a_chat_of_which_the_system_text_is_a_small_part_is_not_taken_over():
    sessions = Sessions()
    long = "why? " * 400
    first = sessions.ask(SYSTEM, user(long, DATE), answer="One.")
    assert sessions.ask(SYSTEM, user(long), assistant("One."), user("two?")) != first


def test_words_that_many_chats_are_answered_with_are_a_sign_at_their_first_turn_only():
    sessions = Sessions()
    first = sessions.ask(SYSTEM, user("Hello!"), assistant("Hi."), user("my cat"))
    longer = (assistant("Hi."), user("my dog"), assistant("Woof."), user("more"))
    assert sessions.ask(SYSTEM, user("Good day!"), *longer) != first


def test_a_chat_that_was_greeted_alike_is_another_one():
    """With its history, as after a restart: of two users the first answers are often the same."""
    sessions = Sessions()
    first = sessions.ask(SYSTEM, user("Hello!"), answer="How can I help you?")
    greeted = assistant("How can I help you?")
    assert sessions.ask(SYSTEM, user("Good day!"), greeted, user("my dog")) != first
    assert sessions.ask(SYSTEM, user("Hello!"), greeted, user("my cat")) == first


def test_a_call_of_an_id_that_many_chats_have_is_no_sign_by_itself():
    sessions = Sessions()
    first = sessions.ask(SYSTEM, user("one task"), *calls("call_0"))
    steps = [*calls("call_0"), *calls("call_1")]
    assert sessions.ask(SYSTEM, user("another task"), *steps) != first
    assert sessions.ask(SYSTEM, user("one task"), *steps) == first
