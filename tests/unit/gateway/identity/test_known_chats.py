"""A request finds the session that it goes on in by its messages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.identity.known_chats import MAX_ALIKE, KnownChats, Link, SessionsSeen, message_chain
from gateway.identity.names import (
    checked_id,
)
from gateway.identity.outline import hashed
from gateway.keys import Tenant
from tests.unit.gateway.in_process import MODEL, App, RecordingEngine, chat_answer, streamed

ALICE = Tenant("alice", b"a" * 32)


BOB = Tenant("bob", b"b" * 32)


class Known:
    """A tenant's sessions, of which some are known."""

    def __init__(self, known: Collection[str] = (), *, quiet: bool = False) -> None:
        self.known = known
        self.quiet = quiet

    def exists(self, id: str) -> bool:
        return id in self.known

    def is_quiet(self, id: str) -> bool:
        return self.quiet

    def tokens_of(self, id: str) -> int:
        return 0

    def is_answered(self, id: str) -> bool:
        return False


none_known = Known()


def chain_of(
    messages: Sequence[object], tenant: Tenant = ALICE, group: str | None = None, tools: object = ()
) -> list[Link]:
    return message_chain(hashed("m", messages, tools, tenant.salt), group)


def identify(
    chats: KnownChats, tenant: Tenant, messages: Sequence[object], seen: SessionsSeen
) -> str:
    return chats.identify(tenant, chain_of(messages, tenant), seen)


def said(*texts: str) -> list[dict[str, Any]]:
    """Messages that alternate between user and assistant."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def test_an_edited_old_turn_is_a_fork_and_leaves_the_chat_alone():
    chats = KnownChats(100)
    chat = identify(chats, ALICE, said("hi"), none_known)
    assert identify(chats, ALICE, said("hi", "hello", "more"), none_known) == chat
    fork = identify(chats, ALICE, said("hi", "hello", "something else"), none_known)
    assert fork != chat
    assert identify(chats, ALICE, said("hi", "hello", "more", "yes", "go on"), none_known) == chat
    more = said("hi", "hello", "something else", "ok", "so")
    assert identify(chats, ALICE, more, none_known) == fork


def test_a_last_question_that_is_written_anew_goes_on_in_its_session():
    """As aider does: the question without its reminder, and the files after the conversation."""
    sessions = Answered(tokens=40)
    begin, files = ("rules", "yes", "example", "ok"), ("files", "seen")
    first = sessions.answered("1", *begin, *files, "one? obey")
    assert sessions.answered("2\n", *begin, "one?", "1", *files, "two? obey") == first
    third = (*begin, "one?", "1", "two?", "2", *files, "three? obey")
    assert sessions.answered("3", *third) == first
    assert sessions.answered("1", *begin, *files, "another? obey") != first  # as long as the first
    assert sessions.answered("3", *third[:-1], "edited? obey") != first
    sessions.busy = {first}
    longer = ("one?", "1", "two?", "2", "three?", "3", *files, "four? obey")
    assert sessions.answered("4", *begin, *longer) != first
    quiet = Answered(tokens=40)
    first = quiet.answered("1", *begin, "one? obey")  # no files
    assert quiet.answered("2", *begin, "one?", "1", *files, "two? obey") != first  # longer by four
    assert quiet.answered("1", *begin, "one? obey") == first
    assert quiet.answered("2", *begin, "one?", "1", "two? obey") == first


def test_a_chat_that_began_alike_and_was_answered_alike_at_first_is_not_taken_over():
    """Its own earlier turns are not known here: after a restart, or of another gateway."""
    begin = ("rules " * 200, "ok", "Hello!", "How can I help?")
    sessions = Answered(tokens=40)
    cat = sessions.answered("It purrs.", *begin, "my cat")
    assert sessions.answered("Good.", *begin, "my dog", "It barks.", "more") != cat
    assert sessions.answered("Sure.", *begin, "my cat", "It purrs.", "more") == cat
    unread = sessions.answered("", *begin, "my bird")  # a call of a tool, or nothing
    assert sessions.answered("So.", *begin, "a bird", "", "more") != unread


def test_a_shared_first_message_is_no_sign_of_a_question_written_anew():
    chats = KnownChats(9)
    one, other = (said("rules", *texts) for texts in (["hi"], ["you", "me", "ho"]))
    found = [chats.identify(ALICE, chain_of(x), Known(quiet=True)) for x in (one, other)]
    assert found[0] != found[1]


def test_a_key_that_chats_share_is_no_identity_but_keeps_them_together():
    chats = KnownChats(100)

    def of(*texts: str, group: str | None) -> str:
        return chats.identify(ALICE, chain_of(said(*texts), group=group), none_known)

    one = of("cats", group="k")
    two = of("dogs", group="k")
    assert one != two
    assert of("cats", "nice", "more", group="k") == one
    assert of("dogs", "good", "more", group="k") == two
    assert of("cats", "nice", "more", "sure", "so", group="k") == one
    assert of("cats", group="other") not in (one, two)
    assert of("cats", group=None) not in (one, two)


def test_tenants_never_share_a_session():
    chats = KnownChats(100)
    assert len({identify(chats, x, said("hi"), none_known) for x in (ALICE, BOB)}) == 2


def test_empty_fields_and_key_order_do_not_matter():
    chats = KnownChats(100)
    chat = identify(chats, ALICE, said("hi", "yo"), none_known)
    echoed = [{**dict(reversed(x.items())), "refusal": None} for x in said("hi", "yo", "more")]
    assert identify(chats, ALICE, echoed, none_known) == chat


def test_after_a_restart_a_chat_is_found_by_its_derived_id():
    before = KnownChats(100)
    chat = identify(before, ALICE, said("hi"), none_known)
    identify(before, ALICE, said("hi", "hello", "more"), none_known)
    after = KnownChats(100)
    turn = said("hi", "hello", "more", "sure", "thanks")
    assert identify(after, ALICE, turn, Known([chat])) == chat
    # Another chat that begins alike does not get a session that is in use by now.
    assert identify(after, ALICE, said("hi"), Known([chat])) != chat


class Answered:
    """Sessions that were all answered, with these tokens."""

    def __init__(self, tokens: int) -> None:
        self.chats = KnownChats(100)
        self.tokens = tokens
        self.known: set[str] = set()
        self.busy: set[str] = set()
        self.only_read: set[str] = set()

    def ask(
        self, messages: Sequence[object], tools: object = None, group: str | None = None
    ) -> str:
        session_id = self.chats.identify(ALICE, chain_of(messages, ALICE, group, tools), self)
        self.known.add(session_id)
        return session_id

    def answered(self, words: str, *messages: str) -> str:
        """Ask, and have it answered with ``words``; returns the session's id."""
        session_id = self.ask(said(*messages))
        self.answer(session_id, words, *messages)
        return session_id

    def answer(self, session_id: str, words: str, *messages: str) -> None:
        on_words = self.chats.on_words(ALICE, session_id, chain_of(said(*messages), ALICE))
        assert on_words is not None
        on_words(words)

    def exists(self, id: str) -> bool:
        return id in self.known

    def is_quiet(self, id: str) -> bool:
        return id in self.known - self.busy

    def tokens_of(self, id: str) -> int:
        return self.tokens if id in self.known else 0

    def is_answered(self, id: str) -> bool:
        return id in self.known - self.only_read


def test_two_chats_that_begin_with_the_same_words_are_two_sessions():
    sessions = Answered(tokens=40)
    first, second = sessions.ask(said("Hello!")), sessions.ask(said("Hello!"))
    assert first != second
    assert sessions.ask(said("Hello!", "Hi.", "my cat")) == first
    assert sessions.ask(said("Hello!", "Yes?", "my dog")) == second
    assert sessions.ask(said("Hello!", "Hi.", "my cat", "Nice.", "it sleeps")) == first
    assert sessions.ask(said("Hello!")) not in (first, second)


def test_chats_that_begin_alike_are_known_by_what_they_were_answered():
    sessions = Answered(tokens=40)
    first, second, third = (sessions.ask(said("Hello!")) for _ in range(3))
    sessions.answer(first, "Hi.\n", "Hello!")
    sessions.answer(second, "Yes?", "Hello!")
    assert sessions.ask(said("Hello!", "Yes?", "my dog")) == second
    assert sessions.ask(said("Hello!", "Good day.", "my bird")) == third  # no answer was seen
    assert sessions.ask(said("Hello!", "Hi.", "my cat")) == first
    assert sessions.ask(said("Hello!", "Hi.", "my cat", "Nice.", "it sleeps")) == first


def test_a_chat_that_was_answered_otherwise_goes_on_in_no_session_of_which_little_is_shared():
    sessions = Answered(tokens=400)
    first = sessions.ask(said("Hello!"))
    sessions.answer(first, "Once upon a time " * 100, "Hello!")
    other = said("Hello!", "Never", "my dog")
    assert sessions.ask(other) != first
    assert sessions.ask(said("Hello!", "Once upon a time " * 100, "more")) == first
    short = Answered(tokens=8)
    first = short.ask(said("Hello!"))
    short.answer(first, "Hi!", "Hello!")
    assert short.ask(said("Hello!", "Hi", "more")) == first  # the client wrote it otherwise


def test_the_answer_to_a_text_is_not_listened_to():
    sessions = Answered(tokens=40)
    text = chain_of(["Once upon"])
    assert sessions.chats.on_words(ALICE, sessions.ask(["Once upon"]), text) is None


def test_a_first_request_that_was_only_read_ahead_of_time_is_the_one_that_is_answered():
    sessions = Answered(tokens=8)
    sessions.only_read.add(first := sessions.ask(said("Hello!")))
    assert sessions.ask(said("Hello!")) == first


def test_a_chat_that_is_being_answered_is_not_the_one_that_another_goes_on_with():
    sessions = Answered(tokens=40)
    first, second = sessions.ask(said("Hello!")), sessions.ask(said("Hello!"))
    sessions.busy = {first}
    assert sessions.ask(said("Hello!", "Yes?", "my dog")) == second


def test_one_that_asks_the_same_for_ever_opens_few_sessions():
    sessions = Answered(tokens=40)
    assert len({sessions.ask(said("are you there?")) for _ in range(50)}) == MAX_ALIKE


def test_a_chat_of_its_own_asked_again_is_one_session():
    sessions = Answered(tokens=40)
    chat = said("hi", "hello", "more")
    assert sessions.ask(chat) == sessions.ask(chat)
    assert sessions.ask(said("hi"), group="k") == sessions.ask(said("hi"), group="k")


def test_other_tools_or_another_system_text_are_another_chat():
    sessions = Answered(tokens=40)
    tools = [{"type": "function", "function": {"name": "f"}}]
    system = [{"role": "system", "content": "be brief"}]
    plain, with_tools = sessions.ask(said("Hello!")), sessions.ask(said("Hello!"), tools)
    with_system = sessions.ask(system + said("Hello!"))
    assert len({plain, with_tools, with_system}) == 3
    more = said("Hello!", "Hi.", "more")
    assert sessions.ask(more, tools) == with_tools
    assert sessions.ask(system + more) == with_system
    assert sessions.ask(more) == plain


def test_after_a_restart_a_session_is_taken_over_only_if_half_of_it_is_known():
    before = Answered(tokens=40)
    long, short = before.ask(said("please " * 100)), before.ask(said("Hello!"))
    after = Answered(tokens=300)  # the session has had more turns
    after.known = {long, short}
    assert after.ask(said("Hello!")) != short
    assert after.ask(said("Hello!", "Yes?", "my dog")) != short
    assert after.ask(said("please " * 100)) != long
    assert after.ask(said("please " * 100, "no", "why")) != long  # some 180 tokens of them
    after.tokens = 150
    again = said("please " * 100, "no", "so", "yes", "well")
    after.chats = KnownChats(100)
    assert after.ask(again) == long


def test_another_answer_to_a_later_question_takes_a_session_over_only_if_half_is_shared():
    sessions = Answered(tokens=400)  # the second answer was long
    first = sessions.answered("1", "one?")
    assert sessions.answered("word " * 300, "one?", "1", "two?") == first
    assert sessions.ask(said("one?", "1", "two?", "short", "three?")) != first
    kept = sessions.ask(said("one?", "1", "two?", "word " * 300, "three?"))
    assert kept == first
    sessions.answer(kept, "3", "one?", "1", "two?", "word " * 300, "three?")
    altered = said("one?", "1", "two?", "word " * 300, "three?", "3!", "four?")
    sessions.tokens = 500
    assert sessions.ask(altered) == first  # most of it is shared all the same


def test_so_it_does_where_that_answer_lies_too_far_back_to_be_named():
    sessions = Answered(tokens=400)
    first = sessions.answered("1", "one?")
    sessions.answered("word " * 300, "one?", "1", "two?")
    more = ("three?", "3", "four?", "4", "five?")
    assert sessions.ask(said("one?", "1", "two?", "short", *more)) != first
    assert sessions.ask(said("one?", "1", "two?", "word " * 300, "three?")) == first
    sessions.answered("3", "one?", "1", "two?", "word " * 300, "three?")
    assert sessions.ask(said("one?", "1", "two?", "word " * 300, "three?", "3", *more)) == first


def test_a_question_written_anew_takes_a_session_over_only_if_half_of_it_is_shared():
    sessions = Answered(tokens=40)
    for num, is_same in ((100, False), (1, True)):
        files = ("files " * num, "seen")
        rules = ("rules " * 20, "ok")
        first = sessions.answered("1", *rules, *files, "one? obey")
        then = sessions.answered("2", *rules, "one?", "1", *files, "two? obey")
        assert (then == first) == is_same


def test_an_instruction_that_stays_last_goes_on_in_its_session():
    """qwen-code asks after each turn what it should remember, and puts no answer to it back."""
    sessions = Answered(tokens=40)
    begin, long = ("rules " * 200, "ok", "one?", "1"), "remember what matters " * 20
    first = sessions.answered("It counts.", *begin, long)
    assert sessions.answered("So.", *begin, "two?", "2", long) == first
    assert sessions.answered("So.", *begin, "2?", "two", "3?", "three", long + "!") != first
    short = sessions.answered("It counts.", *begin, "yes")
    assert sessions.answered("So.", *begin, "and?", "2", "yes") != short


COUNTED = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\n'


COUNTED += b"data: [DONE]\n\n"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_two_users_of_a_key_who_were_greeted_otherwise_go_on_in_their_own_sessions(
    dialect: str, stream: bool
) -> None:
    app = App(RecordingEngine())
    name = "input" if dialect == "/v1/responses" else "messages"

    async def session_of(answer: str, *texts: str) -> str:
        app.engine.answer = streamed(answer, COUNTED) if stream else chat_answer(answer)
        fields = {"model": MODEL, name: said(*texts), "stream": stream, "max_tokens": 99}
        reply = await app.post(dialect, fields)
        assert reply.status == 200
        return reply.headers["x-thermocline-session"]

    first = await session_of("Hi, how are you?", "Hello!")
    second = await session_of("Yes, please?", "Hello!")
    assert await session_of("a dog", "Hello!", "Yes, please?", "my dog") == second
    assert await session_of("a cat", "Hello!", "Hi, how are you?", "my cat") == first


def test_the_longest_unused_chat_is_forgotten_first():
    chats = KnownChats(2)
    first = identify(chats, ALICE, said("a"), none_known)
    second = identify(chats, ALICE, said("b"), none_known)
    assert identify(chats, ALICE, said("a", "x", "y"), none_known) == first
    identify(chats, ALICE, said("c"), none_known)
    assert identify(chats, ALICE, said("a", "x", "y", "z", "w"), none_known) == first
    assert identify(chats, ALICE, said("b", "x", "y"), none_known) != second


@given(st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=6), max_size=40))
def test_a_request_and_its_retry_are_one_session_after_any_requests(requests: list[list[str]]):
    chats = KnownChats(5)
    for texts in requests:
        session_id = identify(chats, ALICE, said(*texts), none_known)
        assert checked_id(session_id, "derived") == session_id
        assert identify(chats, ALICE, said(*texts), none_known) == session_id
